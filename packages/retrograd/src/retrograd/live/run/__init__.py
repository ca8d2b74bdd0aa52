"""Running: a plan calls segments, opaque calls and accumulations in eager's order."""
