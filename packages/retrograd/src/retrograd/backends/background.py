"""Compile on another thread while backwards go on, interpreted.

In: something to compile. Out: `Later`, which becomes code between two backwards: within one, every segment
runs as it ran at its start. One thread compiles, in the order of asking; Inductor's own worker processes do
most of the work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from retrograd.backends.base import Boxed
from retrograd.process import ForkSafeLock


class Later:
    """Code that is not there yet.

    Attributes:
        code: the code, once a backward has begun since it was there.
        error: why there will be none.
    """

    def __init__(self, future: Future[Boxed]) -> None:
        self.future = future
        self.code: Boxed | None = None
        self.error: BaseException | None = None

    def take(self) -> None:
        """Between two backwards: the code, or what went wrong."""
        self.error = self.future.exception()
        if self.error is None:
            self.code = self.future.result()


#: what has begun and has not been taken yet.
pending: list[Later] = []
_lock = ForkSafeLock()


def begin(compile: Callable[[], Boxed]) -> Later:
    """Compile on another thread."""
    later = Later(_thread().submit(compile))
    with _lock:
        pending.append(later)
    return later


def take_finished() -> None:
    """A backward begins: what is finished becomes code."""
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
    """The thread is not there in a child; what it was compiling stays interpreted."""
    pending.clear()
    _thread.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
