"""Running: a partition is called like the function, and its results have autograd nodes."""
