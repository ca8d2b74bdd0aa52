"""Regional compilation of ATen graphs: we compile what repeats in a graph once, and call it many times."""
