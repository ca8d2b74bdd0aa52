"""State shared by all calls that may be recorded: their memory pools, and the order in which they run.

In: a recorder, and calls as they run. Out: `Program`, which picks the pool for a new recording, and decides
when to record everything again in the order of the calls.
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
    """The calls of a program, and the pools of their recordings.

    Args:
        recorder: makes the recordings.

    Attributes:
        replaying: a lock, held from the decision to replay until results are handed out: another thread may
            overwrite them.
        pools: the pools in use. Recordings own their pools.
        is_untidy: True if everything should be recorded again.
        rounds: how many rounds the program has completed since it grew.
    """

    def __init__(self, recorder: CudaRecorder) -> None:
        self.recorder, self.replaying = recorder, ForkSafeLock()
        self.pools: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()
        self.is_untidy = False
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        #: the call that starts a round; how often we recorded everything again.
        self._first: weakref.ref[Any] | None = None
        self.rounds = self._tidied = 0

    def enter(self, call: object) -> None:
        """Add a call."""
        with self.replaying:
            self._calls.add(call)

    # the order of calls

    def grows(self) -> None:
        """Note that a call runs for the first time. We wait until the calls after it have run again."""
        self.rounds, self._tidied, self._first = 0, 0, None

    def runs(self, call: object) -> None:
        """Note that a call runs. If the recordings are out of order, and no result is referenced, we drop all
        of them: recordings made in the order of the calls take less memory."""
        first = self._first and self._first()
        if first is None:
            self._first = weakref.ref(call)
        elif first is call:
            self.rounds += 1
            self.is_untidy = self._lies_out_of_order()
        if not self.is_untidy or self._tidied >= MOST_TIDIED or any(pool.is_held() for pool in self._pools()):
            return
        self.is_untidy, self._tidied = False, self._tidied + 1
        for one in [*self._calls]:
            one.restart()

    def _lies_out_of_order(self) -> bool:
        """Whether many recordings were replaced, but few recently."""
        pools = self._pools()
        rounds = min([pool.comes_round() for pool in pools], default=0)
        return QUIET <= rounds < QUIET + PATIENCE and any(pool.has_gaps() for pool in pools)

    # memory pools

    def _pools(self) -> list[Pool]:
        return [*self.pools.values()]

    def given(self) -> set[int]:
        """The storage addresses of all results that recordings hand out."""
        return set().union(*[pool.given() for pool in self._pools()])

    def pool(self, device: torch.device, *key: Hashable) -> tuple[Hashable, Pool]:
        """A pool with this key where a new recording overwrites nothing, and its key in `pools`. The caller
        adds a new pool to `pools` once something is recorded in it."""
        number = 0
        while (pool := self.pools.get((device, *key, number))) is not None and pool.is_unowned_in_use():
            number += 1
        if pool is None:
            pool = Pool(self.recorder.new_pool(device), may_donate=number < MOST_DONATING)
        return (device, *key, number), pool
