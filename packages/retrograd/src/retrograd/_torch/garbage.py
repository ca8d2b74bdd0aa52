"""No search for garbage while graphs are made.

In: a block that makes many objects and drops few. Out: the block, run without the collector of reference
cycles. The collector looks at new objects again and again, and at all objects of the process whenever there
are a quarter more of them: next to torch's modules that is a third of a second each time, and the capture of
a deep model would pay it several times. Memory of tensors that are in no cycle is given back at once all the
same.
"""

from __future__ import annotations

import gc
import os
import threading

from retrograd._torch.locks import ForkSafeLock

__all__ = ["GarbagePause", "no_garbage_search"]


class GarbagePause:
    """A context in which the collector is off; any number of threads may be inside, each any number of times.

    With the last that leaves, the collector is on again if it was on before the first came.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._inside: dict[int, int] = {}
        self._was_on = False
        os.register_at_fork(after_in_child=self._forget_others)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside[me] = self._inside.get(me, 0) + 1

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        with self._lock:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._resume_if_empty()

    def _resume_if_empty(self) -> None:
        if not self._inside and self._was_on:
            gc.enable()

    def _forget_others(self) -> None:
        """In a forked child only the thread that forked is left."""
        if self._inside:
            me = threading.get_ident()
            self._inside = {thread: count for thread, count in self._inside.items() if thread == me}
            self._resume_if_empty()


no_garbage_search = GarbagePause()
