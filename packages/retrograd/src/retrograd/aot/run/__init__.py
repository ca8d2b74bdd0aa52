"""Run time: calls a partition like the original function and attaches autograd nodes to its results."""
