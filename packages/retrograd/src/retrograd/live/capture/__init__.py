"""Capture: turns one backward into a `BackwardGraph` as the engine walks it, and cuts it into segments."""
