"""What calls that may be recorded share: the pools of their recordings, and the order in which they run.

In: a recorder, and calls as they run. Out: `Program`, which finds the pool for a new recording, and says when
everything is to be recorded once more, in the order of the calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from retrograd.cudagraphs.pool import Pool
from retrograd.policy import MOST_DONATING, MOST_TIDIED, PATIENCE, QUIET
from retrograd.process import ForkSafeLock
from retrograd.runtime.cuda import CudaRecorder


class Program:
    """The calls of a program, and the pools of what is recorded of them.

    Args:
        recorder: makes the recordings.

    Attributes:
        replaying: held from the decision to replay until results are handed out: others may write to them.
        pools: what recordings lie in at present; they hold it.
        is_untidy: whether all is to be recorded once more.
    """

    def __init__(self, recorder: CudaRecorder) -> None:
        self.recorder, self.replaying = recorder, ForkSafeLock()
        self.pools: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()
        self.is_untidy = False
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        #: the call with which the program comes round; how often it has, and how often all began again.
        self._first: weakref.ref[Any] | None = None
        self._rounds = self._tidied = 0

    def enter(self, call: object) -> None:
        """Take note of one more call."""
        with self.replaying:
            self._calls.add(call)

    # the order of calls

    def grows(self) -> None:
        """A call runs for the first time: what runs next is to come again."""
        self._rounds, self._tidied, self._first = 0, 0, None

    @property
    def has_come_round(self) -> bool:
        """Whether it has come round since it grew."""
        return self._rounds > 0

    def runs(self, call: object) -> None:
        """A call runs. If recordings lie out of order, and nobody holds results, all calls begin again: what
        is recorded in the order of the calls takes less memory."""
        first = self._first and self._first()
        if first is None:
            self._first = weakref.ref(call)
        elif first is call:
            self._rounds += 1
            self.is_untidy = self._lies_out_of_order()
        if not self.is_untidy or self._tidied >= MOST_TIDIED or any(pool.is_held() for pool in self._pools()):
            return
        self.is_untidy, self._tidied = False, self._tidied + 1
        for one in [*self._calls]:
            one.restart()

    def _lies_out_of_order(self) -> bool:
        """Whether many recordings were made again, and few of late."""
        pools = self._pools()
        rounds = min([pool.comes_round() for pool in pools], default=0)
        return QUIET <= rounds < QUIET + PATIENCE and any(pool.has_gaps() for pool in pools)

    # their pools

    def _pools(self) -> list[Pool]:
        return [*self.pools.values()]

    def given(self) -> set[int]:
        """Where the storages begin that recordings hand out."""
        return set().union(*[pool.given() for pool in self._pools()])

    def pool(self, device: torch.device, *key: Hashable) -> tuple[Hashable, Pool]:
        """The pool of those with such a key in which what is recorded now overwrites nothing, and its own key
        among `pools`. A new one is entered there when something has been recorded in it."""
        number = 0
        while (pool := self.pools.get((device, *key, number))) is not None and pool.is_unowned_in_use():
            number += 1
        if pool is None:
            pool = Pool(self.recorder.new_pool(device), may_donate=number < MOST_DONATING)
        return (device, *key, number), pool
