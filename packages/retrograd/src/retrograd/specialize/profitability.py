"""Decides whether compiled code is worth it.

In: the times of some calls after the last compilation: compiled, then eager, then compiled ones. Out: whether
calls stay compiled. Inputs may have two or three sizes in turn, and this order meets each of them equally
often in both ways. A machine may be busy for a while, and falling back to eager is permanent. So both the
median and the second smallest time must be slower than eager, and must be so again some calls later; these
calls run in eager. We do not measure long calls: they spend their time in kernels, and an eager run might run
out of memory. Under deterministic algorithms we never decide by a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from retrograd.errors import Reason
from retrograd.policy import SAMPLES, SHORT, STEADY, TOLERANCE, UNTIL_CONFIRMED


class Pace:
    """Measures one training step, or backwards of one kind.

    Args:
        name: of what we measure, for the reason.
        stage: as in `Reason`.
        short: seconds. Calls that take longer are not measured, and stay compiled.

    Attributes:
        disabled: why calls run in eager mode from now on; None if they do not.
    """

    def __init__(self, name: str, stage: str, short: float = SHORT) -> None:
        self._name, self._stage, self._short = name, stage, short
        self.disabled: Reason | None = None
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._compilations = -1
        self._calm = 0
        self._is_decided = self._is_suspected = False

    def is_worth_compiling(self) -> bool:
        """Whether the next call should run compiled."""
        if self.disabled is not None or (self._is_suspected and self._calm < 0):
            return False
        measured = sum(map(len, self._samples.values()))
        is_turn_of_eager = SAMPLES // 2 <= measured < SAMPLES // 2 + SAMPLES
        return self._is_decided or self._calm <= STEADY or not is_turn_of_eager

    @contextmanager
    def timed(self, is_compiled: bool, compilations: Callable[[], int]) -> Iterator[None]:
        """Time the call inside the block. `compilations` returns how much was compiled so far."""
        if self._is_decided:
            yield
            return
        measures = self._calm >= STEADY
        if measures:
            _finish_pending_work()
        start = time.perf_counter()
        yield
        if measures:
            _finish_pending_work()
        self._note(is_compiled, time.perf_counter() - start, compilations())

    def _note(self, is_compiled: bool, seconds: float, compilations: int) -> None:
        is_calm, self._compilations = compilations == self._compilations, compilations
        self._calm = self._calm + 1 if is_calm else 0
        if not is_calm:
            self._samples = {True: [], False: []}
        elif self._calm > STEADY:
            self._samples[is_compiled].append(seconds)
            compiled = self._samples[True]
            is_long = len(compiled) == SAMPLES // 2 and min(compiled) > self._short
            if is_long or torch.are_deterministic_algorithms_enabled():
                self._is_decided = True
            elif min(map(len, self._samples.values())) >= SAMPLES:
                self._decide()

    def _decide(self) -> None:
        compiled, eager = self._samples[True], self._samples[False]
        is_slower = all(of(compiled) > TOLERANCE * of(eager) for of in (statistics.median, _second_smallest))
        if is_slower and not self._is_suspected:
            self._is_suspected, self._calm = True, -UNTIL_CONFIRMED
            self._samples = {True: [], False: []}
            return
        self._is_decided = True
        if is_slower:
            medians = [statistics.median(samples) * 1e3 for samples in (compiled, eager)]
            self.disabled = Reason(
                "slower-than-eager",
                f"{self._name} takes {medians[0]:.2f} ms compiled and {medians[1]:.2f} ms eager",
                self._stage,
                way_out="nothing to do: it runs eagerly from now on; reset() measures again",
            )


def _second_smallest(samples: list[float]) -> float:
    return sorted(samples)[1]


def _finish_pending_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
