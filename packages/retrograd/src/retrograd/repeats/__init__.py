"""Regions of ATen graphs: what repeats itself in a graph is compiled once and called many times."""
