"""Capture: turns one backward, as the engine walks it, into a `BackwardGraph`, and cuts that into
segments."""
