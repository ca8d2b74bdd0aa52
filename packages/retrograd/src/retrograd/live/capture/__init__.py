"""Capture: one backward, as the engine walks it, becomes a `BackwardGraph`, which is cut into segments."""
