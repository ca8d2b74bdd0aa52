"""Compiles on another thread, while calls run in eager mode.

In: a function that compiles, and how long to wait for it. Out: a future. Its code may run once we have taken
it. One thread compiles, in the order of requests; Inductor's worker processes do most of the work.
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

#: code, or the error of its compilation.
PendingCode = Future[Boxed]

#: compilations that were started and not taken yet; those that were taken.
pending: weakref.WeakSet[PendingCode] = weakref.WeakSet()
_taken: weakref.WeakSet[PendingCode] = weakref.WeakSet()
_lock = ForkSafeLock()


def begin(compile: Callable[[], Boxed], seconds: float) -> PendingCode:
    """Compile on another thread, and wait for at most `seconds`. If it finishes in time, we take the code."""
    job = _thread().submit(contextvars.copy_context().run, compile)
    in_time = bool(seconds and wait([job], seconds).done)
    if in_time:
        job.result()
    with _lock:
        (_taken if in_time else pending).add(job)
    return job


def is_taken(job: PendingCode) -> bool:
    """Whether the code may run: it finished in time, or a backward has begun since it finished."""
    return job in _taken


def take_finished() -> None:
    """Call this when a backward begins. Takes finished code, so that segments never change in a backward."""
    with _lock:
        for job in [job for job in pending if job.done()]:
            pending.remove(job)
            _taken.add(job)


def wait_for_all(timeout: float | None = None) -> bool:
    """Wait for all compilations, for at most `timeout` seconds. Returns whether they are finished."""
    with _lock:
        futures = list(pending)
    return not wait(futures, timeout).not_done


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "retrograd-compile")


def _after_fork() -> None:
    """Drop the thread: it does not exist in a forked child. What it was compiling stays interpreted there."""
    pending.clear()
    _thread.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
