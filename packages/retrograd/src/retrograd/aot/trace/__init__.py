"""Tracing: a function and the autograd graph that eager made of it become one joint graph."""
