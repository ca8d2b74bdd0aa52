"""Lowering: segments of a captured backward become code, with guards, shared where they are equal."""
