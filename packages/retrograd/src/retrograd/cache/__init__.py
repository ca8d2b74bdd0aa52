"""What was compiled, found again: by a key, then by guards. Bounded."""
