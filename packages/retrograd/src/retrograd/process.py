"""State of the process and its threads: forgotten by ``reset``, usable after a fork, restored after errors.

In: each module with process-wide state registers how to forget it, and gets its locks here. What it keeps for
each thread is a `ThreadValue`; if it switches something of torch's, it registers how to read and restore it.
Out: `forget_everything`, locks that are free in a forked child, bounded mappings, and `restored_on_error`.

An interrupt may arrive between any two instructions: even after a lock is taken but before its ``with`` block
begins, or in the ``finally`` that would release it. So ``with`` blocks are not enough. The outermost function
of a backward reads all state beforehand, and restores it if anything raises.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

Forget = TypeVar("Forget", bound=Callable[[], object])
Entry = TypeVar("Entry")
T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    cached_property = functools.cached_property
else:

    class cached_property(functools.cached_property):
        """Avoids Python 3.11's single lock for all instances, which an interrupt may leave locked."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            """The value, computed by the first access."""
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


_forgets: list[Callable[[], object]] = []


def forgotten_by_reset(forget: Forget) -> Forget:
    """Make ``reset`` call `forget`. Returns `forget`, so that this works as a decorator."""
    _forgets.append(forget)
    return forget


def forget_everything() -> None:
    """Call all registered functions."""
    for forget in list(_forgets):
        forget()


_values: Any = threading.local()


class ThreadValue(Generic[T]):
    """A variable that each thread has for itself. After an error it is what it was (see `restored_on_error`).

    Args:
        default: its value where this thread has set none.
    """

    def __init__(self, default: T) -> None:
        self._default = default

    def get(self) -> T:
        """The value on this thread."""
        value: T = _values.__dict__.get(self, self._default)
        return value

    def set(self, value: T) -> None:
        """Set the value on this thread."""
        _values.__dict__[self] = value

    @contextmanager
    def switched(self, value: T) -> Iterator[None]:
        """Inside, this thread has `value`."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(before)


#: For each kind of thread state that is not ours, the functions that read and restore it.
_thread_states: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []


def restore_after_errors(read: Callable[[], T], restore: Callable[[T], object]) -> None:
    """Make `restored_on_error` restore a kind of thread state.

    Args:
        read: returns the state. It is called before each backward, so it must be fast.
        restore: receives an earlier result of `read` if the state has changed. It may be called twice.
    """
    _thread_states.append((read, restore))


#: What reads and sets whether Dynamo watches this thread's frames. They are functions of C, which
#: `restored_on_error` calls itself: when a frame that Dynamo leaves out returns, Dynamo is on again.
dynamo_switch: tuple[Callable[[], Any], Callable[[Any], object]] = (lambda: None, lambda _: None)


def restored_on_error(body: Callable[..., T], *args: Any) -> T:
    """Return ``body(*args)``. If it raises, at whatever instruction, restore the state of this thread."""
    (read_dynamo, set_dynamo), before = dynamo_switch, [read() for read, _ in _thread_states]
    dynamo, values = read_dynamo(), _values.__dict__.copy()
    try:
        try:
            return body(*args)
        except BaseException:
            set_dynamo(dynamo)
            restore_saved(before, values)
            raise
    except BaseException:
        set_dynamo(dynamo)  # an interrupt may have cut the first attempt short
        restore_saved(before, values)
        raise


def restore_saved(before: list[Any], values: dict[Any, Any]) -> None:
    """Restore the state of this thread to that read `before`, and its own variables to `values`."""
    _values.__dict__.clear()
    _values.__dict__.update(values)
    for (read, restore), value in zip(_thread_states, before, strict=False):
        if read() != value:
            restore(value)


class _Held(threading.local):
    """The locks that this thread holds or is about to take, innermost last."""

    def __init__(self) -> None:
        self.locks: list[ForkSafeLock] = []


class ForkSafeLock:
    """A reentrant lock that is free in a forked child, unless the forking thread holds it. After an error it
    is released (see `restored_on_error`).

    A forked child has only the forking thread. A lock held by any other thread would never be released.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def renew(self) -> None:
        """In a forked child, release the lock if another thread of the parent held it."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()

    def take_if_free(self) -> bool:
        """Take the lock if nobody holds it, not even this thread. Returns whether it was free."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return False
        _held.locks.append(self)
        is_taken = self._lock.acquire(blocking=False)
        if not is_taken:
            _held.locks.remove(self)
        return is_taken

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
        _held.locks.remove(self)

    def __enter__(self) -> None:
        _held.locks.append(self)  # before the lock is taken, so that an error cannot leave it unrecorded
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        _held.locks.remove(self)

    def keep(self, times: int) -> None:
        """Release the lock until this thread holds it only `times` times."""
        while self._lock._is_owned() and _depth(self._lock) > times:  # type: ignore[attr-defined]
            self._lock.release()


def _depth(lock: Any) -> int:
    """How often the owner has taken the lock. Before Python 3.13 only its ``repr`` tells."""
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

#: Held while a function is traced, because torch's tracers have state in module globals.
tracing = ForkSafeLock()

#: Held while Inductor compiles a graph, for the same reason. Other threads may trace meanwhile.
compiling = ForkSafeLock()


class Recent(Generic[Entry]):
    """A mapping that holds only the most recently used entries; ``reset`` empties it.

    Args:
        kept: the maximum number of entries, so that a long process does not grow without bound.
    """

    def __init__(self, kept: int = 512) -> None:
        self._kept = kept
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._lock = ForkSafeLock()
        forgotten_by_reset(self.clear)

    def get(self, key: Hashable, make: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The entry, and whether this call made it."""
        with self._lock:
            is_new = key not in self._entries
            if is_new:
                self._entries[key] = make()
                while len(self._entries) > self._kept:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key], is_new

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
