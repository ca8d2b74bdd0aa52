"""Compile on another thread, while calls run as eager runs them.

In: something to compile, and how long to wait for it. Out: a future, whose code may run once it is taken. One
thread compiles, in the order of asking; Inductor's own worker processes do most of the work.
"""

from __future__ import annotations

import contextvars
import functools
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from retrograd.backends.base import Boxed
from retrograd.process import ForkSafeLock

#: code, or what went wrong while it was compiled.
PendingCode = Future[Boxed]

#: what has begun and was not taken yet; what was taken.
pending: weakref.WeakSet[PendingCode] = weakref.WeakSet()
_taken: weakref.WeakSet[PendingCode] = weakref.WeakSet()
_lock = ForkSafeLock()


def begin(compile: Callable[[], Boxed], seconds: float) -> PendingCode:
    """Compile on another thread, and wait for it for at most `seconds`. What is there in time is taken."""
    job = _thread().submit(contextvars.copy_context().run, compile)
    in_time = bool(seconds and wait([job], seconds).done)
    if in_time:
        job.result()
    with _lock:
        (_taken if in_time else pending).add(job)
    return job


def is_taken(job: PendingCode) -> bool:
    """Whether the code was there in time, or a backward has begun since: it may run."""
    return job in _taken


def take_finished() -> None:
    """A backward begins: what is finished is taken. Within one backward, segments do not change."""
    with _lock:
        for job in [job for job in pending if job.done()]:
            pending.remove(job)
            _taken.add(job)


def wait_for_all(timeout: float | None = None) -> bool:
    """Wait until everything that has begun is finished, for at most `timeout` seconds; whether it is."""
    with _lock:
        futures = list(pending)
    return not wait(futures, timeout).not_done


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "retrograd-compile")


def _after_fork() -> None:
    """The thread does not exist in a child; what it was compiling stays interpreted there."""
    pending.clear()
    _thread.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
