"""Is a compiled step worth it?

In: the times of some calls, compiled and eager in turn, taken after the last compilation. Out: whether the
step stays compiled. Only short steps are measured, where the time of the host counts. A long step spends its
time in kernels, and running it eagerly might need more memory than there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from retrograd.dynamo.step_report import StepReport
from retrograd.errors import Reason

#: a step is measured if it takes less than this many seconds.
SHORT = 0.02
#: a step is steady after this many calls in a row without a compilation.
STEADY = 3
#: how many calls of each kind are measured.
SAMPLES = 6
#: how much slower than eager a compiled step may be.
TOLERANCE = 1.02


class Pace:
    """Measures one step."""

    def __init__(self) -> None:
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._compilations = -1
        self._calm = 0
        self._is_decided = False

    def is_worth_compiling(self, report: StepReport) -> bool:
        """Whether the next call runs compiled."""
        if report.aside is not None:
            return False
        measures = not self._is_decided and self._calm > STEADY
        return not (measures and len(self._samples[False]) < len(self._samples[True]))

    @contextmanager
    def timed(self, is_compiled: bool, report: StepReport) -> Iterator[None]:
        """Around a call."""
        if self._is_decided:
            yield
            return
        _finish_pending_work()
        start = time.perf_counter()
        yield
        _finish_pending_work()
        self._note(is_compiled, time.perf_counter() - start, report)

    def _note(self, is_compiled: bool, seconds: float, report: StepReport) -> None:
        compilations = report.compilations
        is_calm, self._compilations = compilations == self._compilations, compilations
        self._calm = self._calm + 1 if is_calm else 0
        if not is_calm:
            self._samples = {True: [], False: []}
        elif self._calm > STEADY:
            if seconds > SHORT or torch.are_deterministic_algorithms_enabled():
                self._is_decided = True
                return
            self._samples[is_compiled].append(seconds)
            if min(map(len, self._samples.values())) >= SAMPLES:
                self._decide(report)

    def _decide(self, report: StepReport) -> None:
        self._is_decided = True
        compiled, eager = (statistics.median(self._samples[kind]) for kind in (True, False))
        if compiled > TOLERANCE * eager:
            report.aside = Reason(
                "slower-than-eager",
                f"{report.name} takes {compiled * 1e3:.2f} ms compiled and {eager * 1e3:.2f} ms eager",
                "step",
                way_out="nothing to do: it runs eagerly from now on; reset() measures again",
            )


def _finish_pending_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
