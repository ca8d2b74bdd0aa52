"""Python's cyclic garbage collector, kept from running while the engine hands a backward over.

In: nothing. Out: a context. Handing a backward over makes thousands of Python objects (a tensor per saved
value, a wrapper per autograd node), which all die by their reference counts within milliseconds. The
collector counts allocations and would walk them several times per backward; eager makes none of them, and
never wakes it.

User code is let out (`collector_resumed`): what it leaves in cycles is collected when it always was.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused", "collector_resumed"]


class _Pauses:
    """The pauses that are open, on all threads: the first switches the collector off, the last on again.

    A collector that somebody else has switched off stays off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._is_ours = False

    def change(self, by: int) -> None:
        with self._lock:
            self._count += by
            if self._count and not self._is_ours and gc.isenabled():
                gc.disable()
                self._is_ours = True
            elif not self._count and self._is_ours:
                gc.enable()
                self._is_ours = False

    def after_fork_in_child(self) -> None:
        """Only the thread that forked is left."""
        self._lock = threading.Lock()
        self._count = 0
        self.change(1 if _own.depth else 0)


class _Own(threading.local):
    """How many pauses this thread has open."""

    depth = 0


_pauses, _own = _Pauses(), _Own()
os.register_at_fork(after_in_child=_pauses.after_fork_in_child)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, the collector does not run by itself."""
    _own.depth += 1
    if _own.depth == 1:
        _pauses.change(1)
    try:
        yield
    finally:
        _own.depth -= 1
        if not _own.depth:
            _pauses.change(-1)


@contextmanager
def collector_resumed() -> Iterator[None]:
    """Inside a pause of this thread, as if there were none."""
    depth, _own.depth = _own.depth, 0
    if depth:
        _pauses.change(-1)
    try:
        yield
    finally:
        _own.depth = depth
        if depth:
            _pauses.change(1)
