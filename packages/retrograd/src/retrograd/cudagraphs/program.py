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
from retrograd.policy import FEW, GAPS, MANY, MOST_DONATING, MOST_TIDIED, PATIENCE, QUIET
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
        self.rounds = self._all_rounds = self._tidied = 0
        #: how many recordings were made since everything was last recorded again, and up to the last round;
        #: how many rounds in a row made few.
        self._made = self._seen = self._quiet = 0

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
            self._all_rounds += 1
            self.is_untidy = self._lies_out_of_order()
        if not self.is_untidy or self._tidied >= MOST_TIDIED or any(pool.is_held() for pool in self._pools()):
            return
        self.is_untidy, self._tidied = False, self._tidied + 1
        self._made = self._seen = self._quiet = 0
        for one in [*self._calls]:
            one.restart()

    def _lies_out_of_order(self) -> bool:
        """Whether many recordings were replaced, but few recently."""
        held = sum(pool.let_go() for pool in self._pools())
        is_quiet = (self._made - self._seen) * FEW <= held
        self._quiet, self._seen = self._quiet + 1 if is_quiet else 0, self._made
        return QUIET <= self._quiet < QUIET + PATIENCE and self._made >= held * GAPS >= MANY * GAPS

    # memory pools

    def _pools(self) -> list[Pool]:
        return [*self.pools.values()]

    def given(self) -> set[int]:
        """The storage addresses of all results that recordings hand out."""
        return set().union(*[pool.given() for pool in self._pools()])

    def pool(self, device: torch.device, *key: Hashable) -> tuple[Hashable, Pool]:
        """A pool with this key where a new recording overwrites nothing, and its key in `pools`. The caller
        adds a new pool to `pools` once something is recorded in it.

        If donated memory of the first pool is in use, the recording is late: calls that were recorded there
        run around it. Late recordings share a pool if they are made in the same round, because only these are
        made in the order in which they run. If there are many pools, the others share one that reuses no
        donated memory.
        """
        self._made += 1
        late, rest = (device, *key, self._all_rounds), (device, *key, None)
        if late not in self.pools and len(self.pools) >= MOST_DONATING:
            late = rest
        for found in ((device, *key), late, rest):
            pool = self.pools.get(found)
            if pool is None or not pool.is_unowned_in_use():
                break
        return found, pool or Pool(self.recorder.new_pool(device), may_donate=found != rest)
