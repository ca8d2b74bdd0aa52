"""State of the process and its threads: ``reset`` forgets it, a forked child can use it, errors restore it.

In: each module that keeps something for the process registers here how it is forgotten, and takes its locks
from here. Each module that switches something on a thread for a while registers how that is read and put
back. Out: `forget_everything`, locks that a forked child finds free, mappings that stay small, and
`restored_on_error`.

An interrupt may arrive between any two instructions: also after a lock is taken and before its ``with``
block begins, or in the ``finally`` that would give it back. So blocks do not suffice. The outermost function
of a backward reads the whole state before, and puts it back if anything raises.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

Forget = TypeVar("Forget", bound=Callable[[], object])
Entry = TypeVar("Entry")
T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):
        """Without Python 3.11's one lock for all instances: an interrupt may leave it taken for ever."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            """The value, which is computed by whoever asks first."""
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


_forgets: list[Callable[[], object]] = []


def forgotten_by_reset(forget: Forget) -> Forget:
    """Have ``reset`` call `forget`. Returns `forget`, so this may be used as a decorator."""
    _forgets.append(forget)
    return forget


def forget_everything() -> None:
    """Call everything that was registered."""
    for forget in list(_forgets):
        forget()


#: how each state of a thread is read, and put back.
_thread_states: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []


def restore_after_errors(read: Callable[[], T], restore: Callable[[T], object]) -> None:
    """Have `restored_on_error` restore a state of the thread.

    Args:
        read: gives the state; called before each backward, so it must be quick.
        restore: is given what `read` gave before, if that has changed. It may be called twice.
    """
    _thread_states.append((read, restore))


def restored_on_error(body: Callable[..., T], *args: Any) -> T:
    """What ``body(*args)`` returns. If it raises, at whatever instruction, the state of this thread is put
    back."""
    before = [read() for read, _ in _thread_states]
    try:
        try:
            return body(*args)
        except BaseException:
            restore_saved(before)
            raise
    except BaseException:
        restore_saved(before)  # an interrupt may have cut the first attempt short
        raise


def restore_saved(before: list[Any]) -> None:
    """Restore the state of this thread, as it was read `before`."""
    for (read, restore), value in zip(_thread_states, before, strict=False):
        if read() != value:
            restore(value)


class _Held(threading.local):
    """The locks that this thread has taken, or is about to take, innermost last."""

    def __init__(self) -> None:
        self.locks: list[ForkSafeLock] = []


class ForkSafeLock:
    """A reentrant lock that is free in a forked child, unless the thread that forked holds it. An error gives
    it back (see `restored_on_error`).

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
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return False
        _held.locks.append(self)
        is_taken = self._lock.acquire(blocking=False)
        if not is_taken:
            _held.locks.remove(self)
        return is_taken

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()
        _held.locks.remove(self)

    def __enter__(self) -> None:
        _held.locks.append(self)  # first, so that it is known whatever happens next
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        _held.locks.remove(self)

    def keep(self, times: int) -> None:
        """Give the lock back until this thread holds it so many times."""
        while self._lock._is_owned() and _depth(self._lock) > times:  # type: ignore[attr-defined]
            self._lock.release()


def _depth(lock: Any) -> int:
    """How many times the owner holds the lock: before Python 3.13 only its text says so."""
    return int(repr(lock).partition("count=")[2].partition(" ")[0])


_held = _Held()


def _give_back_locks(before: int) -> None:
    for lock in _held.locks[before:]:
        lock.keep(_held.locks[:before].count(lock))
    del _held.locks[before:]


restore_after_errors(lambda: len(_held.locks), _give_back_locks)

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
