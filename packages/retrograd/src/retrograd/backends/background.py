"""Compile on another thread, while calls run as eager runs them.

In: something to compile, and how long to wait for it. Out: `Later`, which holds the code once it is there.
One thread compiles, in the order of asking; Inductor's own worker processes do most of the work.
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


class Later:
    """Code that may not be there yet.

    Attributes:
        code: the code, if it was there in time, or once a step border has been passed since.
        error: why there will be none.
    """

    def __init__(self, future: Future[Boxed]) -> None:
        self.future = future
        self.code: Boxed | None = None
        self.error: BaseException | None = None

    def take(self) -> None:
        """Take the code, or what went wrong."""
        self.error = self.future.exception()
        if self.error is None:
            self.code = self.future.result()


#: what has begun and was not taken yet.
pending: weakref.WeakSet[Later] = weakref.WeakSet()
_lock = ForkSafeLock()


def begin(compile: Callable[[], Boxed], seconds: float) -> Later:
    """Compile on another thread, and wait for it for at most `seconds`."""
    later = Later(_thread().submit(contextvars.copy_context().run, compile))
    if seconds and wait([later.future], seconds).done:
        later.take()
        if later.error is not None:
            raise later.error
        return later
    with _lock:
        pending.add(later)
    return later


def take_finished() -> None:
    """A backward begins: what is finished becomes code. Within one backward, segments do not change."""
    with _lock:
        finished = [later for later in pending if later.future.done()]
        for later in finished:
            later.take()
            pending.remove(later)


def wait_for_all(timeout: float | None = None) -> bool:
    """Wait until everything that has begun is finished, for at most `timeout` seconds; whether it is."""
    with _lock:
        futures = [later.future for later in pending]
    return not wait(futures, timeout).not_done


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "retrograd-compile")


def _after_fork() -> None:
    """The thread does not exist in a child; what it was compiling stays interpreted there."""
    pending.clear()
    _thread.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
