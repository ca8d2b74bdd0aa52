"""Passes: a value of one kind in, a value of the same kind out. One file each, named for its effect."""
