"""Backends: each turns a graph into code that runs it."""
