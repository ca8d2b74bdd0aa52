"""Passes: each maps a value to another of the same kind. One pass per file, named for its effect."""
