"""State of the whole process: ``reset`` forgets it, and a forked child can use it.

In: each module that keeps something for the process registers here how it is forgotten, and takes its locks
from here. Out: `forget_everything`, locks that a forked child finds free, and mappings that stay small.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Forget = TypeVar("Forget", bound=Callable[[], object])
Entry = TypeVar("Entry")

_forgets: list[Callable[[], object]] = []


def forgotten_by_reset(forget: Forget) -> Forget:
    """Have ``reset`` call `forget`. Returns `forget`, so this may be used as a decorator."""
    _forgets.append(forget)
    return forget


def forget_everything() -> None:
    """Call everything that was registered."""
    for forget in list(_forgets):
        forget()


class ForkSafeLock:
    """A reentrant lock that is free in a forked child, unless the thread that forked holds it.

    A forked child has one thread, the one that forked. A lock that another thread held would never be freed.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def renew(self) -> None:
        """Free the lock in a forked child, if another thread of the parent held it."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()

    def take_if_free(self) -> bool:
        """Take the lock if nobody holds it, this thread included; says whether it was free."""
        return not self._lock._is_owned() and self._lock.acquire(blocking=False)  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)

#: held while a function is traced, because torch's tracers keep state in module globals.
tracing = ForkSafeLock()

#: held while Inductor compiles a graph, because it keeps state in the same way. Other threads may trace.
compiling = ForkSafeLock()


class Recent(Generic[Entry]):
    """A mapping of the entries used last; ``reset`` empties it.

    Args:
        kept: how many, so that a long process does not grow without end.
    """

    def __init__(self, kept: int = 512) -> None:
        self._kept = kept
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._lock = ForkSafeLock()
        forgotten_by_reset(self.clear)

    def get(self, key: Hashable, make: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry, and whether it was made just now."""
        with self._lock:
            is_new = key not in self._entries
            if is_new:
                self._entries[key] = make()
                while len(self._entries) > self._kept:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key], is_new

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
