"""Is compiled code worth it?

In: the times of some calls, compiled and eager in turn, taken after the last compilation. Out: whether they
stay compiled. Long calls are not measured: they spend their time in kernels, and running one eagerly might
need more memory than there is. Under deterministic algorithms nothing is decided by a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from retrograd.errors import Reason

#: a call is measured if it takes less than this many seconds: a backward; and a step, whose first call ran
#: eagerly in any case.
SHORT, SHORT_STEP = 0.02, 1.0
#: a step is steady after this many calls in a row without a compilation.
STEADY = 3
#: how many calls of each kind are measured.
SAMPLES = 6
#: how much slower than eager compiled calls may be.
TOLERANCE = 1.02


class Pace:
    """Measures one step, or the backwards of one kind.

    Args:
        name: of what is measured. stage: as in `Reason`. short: one of the above.

    Attributes:
        aside: why it runs eagerly from now on; None if it does not.
    """

    def __init__(self, name: str, stage: str, short: float = SHORT) -> None:
        self._name, self._stage, self._short = name, stage, short
        self.aside: Reason | None = None
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._compilations = -1
        self._calm = 0
        self._is_decided = False

    def is_worth_compiling(self) -> bool:
        """Whether the next call runs compiled."""
        if self.aside is not None:
            return False
        measures = not self._is_decided and self._calm > STEADY
        return not (measures and len(self._samples[False]) < len(self._samples[True]))

    @contextmanager
    def timed(self, is_compiled: bool, compilations: Callable[[], int]) -> Iterator[None]:
        """Around a call; `compilations` tells how much was compiled so far."""
        if self._is_decided:
            yield
            return
        _finish_pending_work()
        start = time.perf_counter()
        yield
        _finish_pending_work()
        self._note(is_compiled, time.perf_counter() - start, compilations())

    def _note(self, is_compiled: bool, seconds: float, compilations: int) -> None:
        is_calm, self._compilations = compilations == self._compilations, compilations
        self._calm = self._calm + 1 if is_calm else 0
        if not is_calm:
            self._samples = {True: [], False: []}
        elif self._calm > STEADY:
            if seconds > self._short or torch.are_deterministic_algorithms_enabled():
                self._is_decided = True
                return
            self._samples[is_compiled].append(seconds)
            if min(map(len, self._samples.values())) >= SAMPLES:
                self._decide()

    def _decide(self) -> None:
        self._is_decided = True
        compiled, eager = (statistics.median(self._samples[kind]) for kind in (True, False))
        if compiled > TOLERANCE * eager:
            self.aside = Reason(
                "slower-than-eager",
                f"{self._name} takes {compiled * 1e3:.2f} ms compiled and {eager * 1e3:.2f} ms eager",
                self._stage,
                way_out="nothing to do: it runs eagerly from now on; reset() measures again",
            )


def _finish_pending_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
