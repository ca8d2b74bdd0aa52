"""A lock that does not outlive the thread that holds it.

In: nothing. Out: a reentrant lock. In a forked child only the thread that forked is left; a lock that another
one held would never be given back.
"""

from __future__ import annotations

import os
import threading

__all__ = ["ForkSafeLock"]


class ForkSafeLock:
    """A reentrant lock that is free in a forked child, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
