"""Says how far a long capture or compilation is, while it runs.

In: what this thread captures or compiles. Out: lines in the logger ``retrograd.progress``. At DEBUG
(``RETROGRAD_LOGS=progress``) the first line comes after 2 seconds, and one every 5 seconds after it. By
default there is one line, at INFO, once a compilation has taken 10 seconds. It goes to standard error if the
program has not set up logging. A thread of our own writes the lines, because the thread that compiles is
busy.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from retrograd.events import progress_log
from retrograd.policy import FIRST_PROGRESS, NEXT_PROGRESS, UNASKED_PROGRESS
from retrograd.process import ThreadValue


class _Watched:
    """What one thread does that may take long.

    Args:
        what: it does, in words.
        done: how much of it is done, in words.
    """

    def __init__(self, what: str, done: Callable[[], str]) -> None:
        self._what, self._done, self._start = what, done, time.perf_counter()
        #: what is being compiled at the moment; empty if nothing is
        self.now = ""
        self.finished = threading.Event()
        given = weakref.ref(self), self.finished
        threading.Thread(target=_watch, args=given, name="retrograd-progress", daemon=True).start()

    def tell(self) -> bool:
        """Write a line, if it is time for one. Gives whether there may be more."""
        seconds = time.perf_counter() - self._start
        now = self.now if self.now != self._what else ""
        text = "; ".join(filter(None, [f"{self._what}: {seconds:.0f} s so far", self._done(), now]))
        if progress_log.isEnabledFor(logging.DEBUG):
            progress_log.debug("%s", text)
        elif self.now and seconds >= UNASKED_PROGRESS:
            _tell_unasked(f"{text} (RETROGRAD_LOGS=progress tells more)")
            return False
        return True


def _watch(reference: weakref.ref[_Watched], finished: threading.Event) -> None:
    """Run on a thread of our own until what is watched has finished, or an interrupt has dropped it."""
    wait = FIRST_PROGRESS
    while not finished.wait(wait) and (watched := reference()) is not None and watched.tell():
        wait = NEXT_PROGRESS if progress_log.isEnabledFor(logging.DEBUG) else FIRST_PROGRESS
        del watched


def _tell_unasked(text: str) -> None:
    if progress_log.hasHandlers():
        progress_log.info("%s", text)
    else:
        sys.stderr.write(f"[{progress_log.name}] {text}\n")


_here: ThreadValue[_Watched | None] = ThreadValue(None)


@contextmanager
def watched(what: str, done: Callable[[], str] = str) -> Iterator[None]:
    """Inside, this thread does `what`, which may include several compilations. `done` says how many are done.
    A block inside another one adds nothing."""
    if _here.get() is not None:
        yield
        return
    here = _Watched(what, done)
    try:
        with _here.switched(here):
            yield
    finally:
        here.finished.set()


@contextmanager
def working(what: str) -> Iterator[Callable[[], float]]:
    """Inside, this thread captures or compiles `what`. Gives a function that returns the seconds since then;
    0 inside another such block, which counts them."""
    with watched(what):
        here = _here.get()
        assert here is not None
        start, before, here.now = time.perf_counter(), here.now, what
        try:
            yield lambda: 0.0 if before else time.perf_counter() - start
        finally:
            here.now = before
