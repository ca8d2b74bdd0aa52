"""Backends: from the graph of a segment to something that runs it."""
