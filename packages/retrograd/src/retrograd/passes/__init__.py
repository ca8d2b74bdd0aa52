"""Passes take a value of one kind and return one of the same kind. Each has a file, named for its effect."""
