"""Run one boxed function: by its code where it has code that fits and may run now, else as captured.

In: a `BoxedFunction` and the values that arrive. Out: its outputs. If its code fails, the function is
interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from retrograd._torch.log import profiling
from retrograd._torch.state import ThreadModes, why_interpreted_now, without_torch_functions
from retrograd._torch.subclass import is_wrapper
from retrograd.backends.base import Boxed
from retrograd.cudagraphs.graphed_call import graphed
from retrograd.errors import first_line
from retrograd.events import counters
from retrograd.live.lower.lowered import BoxedFunction, How, Lowered, Lowerings
from retrograd.live.lower.lowerer import Lowerer


class BoxedRunner:
    """Runs one boxed function: lowers it at first use, and again when guards fail.

    Args:
        fn: the function.
        how: how to lower it.
        interpret_because: why it is never lowered; None if it may be.
        shared: the results of lowering an equal function elsewhere.

    Attributes:
        fn, shared: as given. lowerer: has the lowerings.
    """

    def __init__(
        self,
        fn: BoxedFunction,
        how: How,
        interpret_because: str | None = None,
        shared: Lowerings | None = None,
    ) -> None:
        self.fn, self._how = fn, how
        self.shared = shared or Lowerings()
        self.lowerer = Lowerer(fn, how, self.shared, partial(_derivative, how))
        self.lowerer.interpret_because = interpret_because
        self._graphed: dict[Lowered, Boxed] = {}
        self._told: set[str] = set()
        self._postponed = ("", 0)

    def postpone(self, because: str, runs: int = 1) -> None:
        """Interpret the next `runs`, if nothing is compiled yet and something will be."""
        if not self.lowerer.lowered and not self.is_interpreted:
            self._postponed = because, runs

    # for plans that are specialised

    @property
    def is_interpreted(self) -> bool:
        """Whether it will never be lowered (again)."""
        return self.lowerer.interpret_because is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is interpreted for the time being, and will have code."""
        coming = (lowered.later for lowered in self.lowerer.lowered)
        return self._postponed[1] > 0 or any(later is not None and later.is_open for later in coming)

    @without_torch_functions
    def direct_code(self, args: list[Any]) -> Lowered | None:
        """What `run` would run for these values, if nothing has to be decided when it runs but its guards;
        `args` stays as it is."""
        if self.is_waiting or torch.get_deterministic_debug_mode() or why_interpreted_now(args) is not None:
            return None
        modes = ThreadModes.now()
        fitting = (lowered for lowered in self.lowerer.lowered if lowered.modes == modes)
        return next((lowered for lowered in fitting if lowered.is_direct and lowered.guard.check(args)), None)

    def failed(self, error: Exception) -> None:
        """Code that had worked has raised `error`: the next backward interprets the segment."""
        counters["run_failures"] += 1
        if not isinstance(error, torch.OutOfMemoryError):
            because = f"its code failed: {first_line(error)}"
            place = f"segment {self._how.number} of this backward"
            error.add_note(f"{place} is interpreted from now on: {because}")
            self.lowerer.stop(because)

    # run

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The function's outputs; `args` is emptied."""
        if self.lowerer.interpret_because is not None or self._is_interpreted_now(args):
            return self.fn.interpreted(args)
        found = self.lowerer.find(args)
        if found is None or not self.lowerer.has_code(found[0]):
            return self.fn.interpreted(args)
        lowered, flat = found
        if torch.get_deterministic_debug_mode() and not lowered.is_deterministic:
            # Eager may have to raise. Where it warns (mode 1), it does so each time.
            results = self.fn.interpreted(args)
            lowered.is_deterministic = torch.get_deterministic_debug_mode() != 1
            return results
        return self._execute(lowered, args, flat)

    def _is_interpreted_now(self, args: list[Any]) -> bool:
        """Whether this run is interpreted, though there may be code for others."""
        because, runs = self._postponed
        if runs:
            self._postponed = because, runs - 1
        now = because if runs else why_interpreted_now(args)
        if now is None and torch.is_grad_enabled() and any(map(is_wrapper, args)):
            now = "tensor subclasses in grad mode"
        if now is not None and now not in self._told:
            self._told.add(now)
            self._how.tell("interpreted", "", now)
        return now is not None

    def _execute(self, lowered: Lowered, args: list[Any], flat: list[Any]) -> Sequence[Any]:
        """Run compiled code. In its first run its inputs are held, so that a failure only costs the
        compilation. Later they are freed as it goes on, and a failure can only be reported."""
        held = None if lowered.has_run else list(args)
        try:
            with self.fn.range() if profiling() else nullcontext():
                results = lowered(args, flat, self.code_of(lowered))
        except Exception as error:
            if held is None:
                self.failed(error)
                raise
            counters["run_failures"] += 1
            # Holding the inputs takes memory: without that the code may have what it needs.
            lowered.has_run = isinstance(error, torch.OutOfMemoryError)
            if not lowered.has_run:
                self.lowerer.give_up(f"its code failed: {first_line(error)}", error)
            return self.fn.interpreted(held)
        lowered.has_run = True
        return results

    def code_of(self, lowered: Lowered) -> Boxed:
        """The code, recorded as a CUDA graph if that is wanted. The recording is for this place alone:
        another place that runs the same code has its inputs elsewhere."""
        if not self._how.config.cudagraphs:
            return lowered.run
        if lowered not in self._graphed:
            self._graphed[lowered] = graphed(lowered.run, lowered.graph, tell=self._how.log.noted)
        return self._graphed[lowered]


def _derivative(how: How, fn: Boxed, role: str) -> Boxed:
    """Runs a derivative of a function that is lowered as `how` says."""
    role = f"{role} of its {how.role}" if how.role else role
    return BoxedRunner(BoxedFunction(fn, fn, fn, nullcontext), replace(how, role=role)).run
