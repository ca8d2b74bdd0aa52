"""Trace a function, and the autograd graph that eager builds for it, into one joint graph."""
