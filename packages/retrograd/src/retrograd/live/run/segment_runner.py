"""Runs segments: with compiled code that fits and may run now, else as captured.

In: a `Segment`, and the values that arrive. Out: its outputs. Equal segments share their code. If its code
fails, a segment is interpreted. That usually means generated Python code. Under a profiler, or if user code
has left modes switched, we run it call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.cudagraphs.graphed_function import graphed
from retrograd.errors import InputsChangedError, first_line
from retrograd.events import counters
from retrograd.graph.backward_graph import Segment, call_of
from retrograd.graph.fx import random_devices
from retrograd.graph.structure import structure_of
from retrograd.live.lower.lowerer import Lowered, Lowerer, Lowerings, SegmentFunction
from retrograd.live.plan_log import PlanLog
from retrograd.process import Recent
from retrograd.report import INTERPRETED, LoweringReport
from retrograd.runtime.modes import (
    generator_states,
    restore_generator_states,
    why_interpreted_now,
)
from retrograd.runtime.profiler import profiling

_NOTHING = nullcontext()


class SegmentRunner:
    """Runs one segment. Lowers it at first use, and again when guards fail."""

    def __init__(
        self, fn: SegmentFunction, interpret_because: str | None = None, shared: Lowerings | None = None
    ) -> None:
        self.fn = fn
        self.shared = shared or Lowerings()
        self.lowerer = Lowerer(fn, self.shared)
        self.lowerer.interpret_because = interpret_because
        self._graphed: dict[Lowered, Boxed] = {}
        self._told: set[str] = set()
        self._postponed = ("", 0)
        #: the code that ran last, if it takes no tensor subclasses
        self.ran: Lowered | None = None

    def postpone(self, because: str, runs: int = 1) -> None:
        """Interpret the next `runs`, unless the segment has been compiled or never will be."""
        if not self.lowerer.lowered and not self.is_interpreted:
            self._postponed = because, runs

    @property
    def is_interpreted(self) -> bool:
        """Whether the segment will never be lowered (again)."""
        return self.lowerer.interpret_because is not None

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Compute the outputs. `args` is emptied."""
        if self.lowerer.interpret_because is not None or self._is_interpreted_now(args):
            return self.fn.interpreted(args)
        found = self.lowerer.find(args)
        if found is None or not self.lowerer.has_code(found[0]):
            return self.fn.interpreted(args)
        lowered, flat = found
        if lowered.modes.deterministic and not lowered.is_deterministic:
            # Eager may have to raise an error about determinism. In mode 1 it warns, in each run.
            results = self.fn.interpreted(args)
            lowered.is_deterministic = lowered.modes.deterministic != 1
            return results
        return self._execute(lowered, args, flat)

    def _is_interpreted_now(self, args: list[Any]) -> bool:
        """Whether this run is interpreted, although there may be code."""
        because, runs = self._postponed
        if runs:
            self._postponed = because, runs - 1
        now = because if runs else why_interpreted_now(args)
        if now is not None and now not in self._told:
            self._told.add(now)
            self.fn.tell(INTERPRETED, "", now)
        return now is not None

    def _execute(self, lowered: Lowered, args: list[Any], flat: list[Any]) -> Sequence[Any]:
        """Run compiled code. We hold the inputs during its first run, so that a failure costs only the
        compilation. In later runs the code frees them as it goes, and we can only report a failure."""
        self.ran = lowered if lowered.has_run and lowered.border is None else None
        if lowered.has_run:
            with self.fn.log.segment_range(self.fn.segment, self.fn.number) if profiling() else _NOTHING:
                return self.run_code(lowered, args, flat, self.code_of(lowered))
        held, generators = list(args), generator_states(random_devices(lowered.graph))
        try:
            results = lowered(args, flat, self.code_of(lowered))
        except InputsChangedError:
            raise
        except Exception as error:
            counters["run_failures"] += 1
            # The inputs that we hold take memory. Without them the code may have enough.
            lowered.has_run = isinstance(error, torch.OutOfMemoryError)
            if not lowered.has_run:
                self.lowerer.give_up(f"its code failed: {first_line(error)}", error)
            restore_generator_states(generators)
            return self.fn.interpreted(held)
        lowered.has_run = True
        return results

    def run_code(self, lowered: Lowered, args: list[Any], flat: list[Any], code: Boxed) -> Sequence[Any]:
        """Run code that has worked before. If it fails, later backwards interpret the segment.

        Raises:
            Exception: whatever the code raises.
        """
        try:
            return lowered(args, flat, code)
        except Exception as error:
            counters["run_failures"] += 1
            if not isinstance(error, torch.OutOfMemoryError):
                because = f"its code failed: {first_line(error)}"
                place = f"segment {self.fn.number} of this backward"
                error.add_note(f"{place} is interpreted from now on: {because}")
                self.lowerer.stop(because)
            raise

    def code_of(self, lowered: Lowered) -> Boxed:
        """The code, recorded as a CUDA graph if the user asks for that. Only this runner uses the recording:
        another segment that runs the same code has its inputs at other addresses."""
        if not self.fn.config.cudagraphs:
            return lowered.run
        if lowered not in self._graphed:
            self._graphed[lowered] = graphed(lowered.run, lowered.graph, tell=self.fn.log.recorded)
        return self._graphed[lowered]


#: Runners, by settings, index, structure and node calls. Those of an earlier plan are used again for equal
#: segments.
_runners: Recent[SegmentRunner] = Recent()

#: the code of segments, by settings and structure
_lowerings: Recent[Lowerings] = Recent()


def runner_of(segment: Segment, number: int, config: Config, backend: Backend, log: PlanLog) -> SegmentRunner:
    """A runner for the segment. If an earlier plan has an equal segment with the same index, we use its
    runner. Else it is a new one, which shares its code with equal segments that have other indices."""
    because = _why_interpreted(segment, backend)
    structure = structure_of(segment.nodes, segment.inputs, segment.outputs) if because is None else None

    def make(shared: Lowerings | None = None) -> SegmentRunner:
        return SegmentRunner(SegmentFunction(segment, number, config, backend, log), because, shared)

    if structure is None:
        return make()

    shared, _ = _lowerings.get((config, structure), Lowerings)
    # The runner refers to its calls by node call, for profilers and for modes that hooks leave switched.
    node_calls = tuple(call_of(node).node_call for node in segment.nodes)
    runner, is_new = _runners.get((config, number, structure, node_calls), lambda: make(shared))
    if not is_new:
        because = "shared with an earlier backward's equal segment"
        log.lowered(LoweringReport(number, backend.name, "", because))
    return runner


def _why_interpreted(segment: Segment, backend: Backend) -> str | None:
    if not backend.traces:
        return f"backend {backend.name} interprets"
    return None if segment.worth_compiling else "nothing in it is worth compiling"
