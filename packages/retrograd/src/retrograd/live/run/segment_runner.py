"""Run segments: lowered as `live.lower` does it, with names for profilers and traces, and shared where equal.

In: a `Segment` and the values that arrive at it. Out: its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from retrograd._torch.log import profiling
from retrograd._torch.trace import Traced
from retrograd.backends.background import Later
from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.events import counters
from retrograd.graph.backward_graph import Segment, call_of
from retrograd.graph.emit import boxed_calls
from retrograd.live.capture.structure import family_of, numbers_of, structure_of
from retrograd.live.lower.lift_scalars import Family
from retrograd.live.lower.lowered import How, Lowered, Lowerings
from retrograd.live.lower.lowerer import BoxedRunner
from retrograd.live.lower.sharing import families, lowerings, runners
from retrograd.live.plan_log import PlanLog
from retrograd.live.run.leaked_modes import LeakedModes
from retrograd.live.run.step_through import step_through
from retrograd.report import LoweringReport


class SegmentRunner(BoxedRunner):
    """Runs one segment.

    Args:
        segment: the segment, and `number` its place among the segments of its schedule.
        config, backend: how to lower it.
        log: is told every lowering.
        shared: what has come of lowering an equal segment.
        family: the segments that are equal but for their numbers.
    """

    def __init__(  # noqa: PLR0913 - what it is, how it is lowered, and what it shares
        self,
        segment: Segment,
        number: int,
        config: Config,
        backend: Backend,
        log: PlanLog,
        shared: Lowerings | None = None,
        family: Family | None = None,
    ) -> None:
        self._segment = segment
        how = How(number, _names(segment), config, backend, log)
        super().__init__(self._interpreted, how, _why_interpreted(segment, backend), shared)
        self._numbers = numbers_of(segment.nodes)
        self._family = family if self._numbers else None
        if self._family is not None:
            self._family.join(self._numbers, self._traced_as_captured)

    @property
    def shared(self) -> Family | Lowerings:
        """What it shares with segments of equal structure, but for numbers."""
        return self._family or self._shared

    # Most segments of a deep model are never interpreted: they run the code of an equal one.

    @functools.cached_property
    def _boxed(self) -> Boxed:
        segment = self._segment
        return boxed_calls(segment.inputs, segment.nodes, segment.outputs)

    def _interpreted(self, args: list[Any]) -> Sequence[Any]:
        return self._boxed(args)

    def _traced_as_captured(self, args: Sequence[Any]) -> Traced:
        return self._traced(self._run_noted, args)

    def _code(self, traced: Traced, args: Sequence[Any] | None) -> tuple[Boxed, Later | None]:
        if self._family is not None and args is not None and self._config.patience is None:
            code = self._family.code_for(self._numbers, traced, args, self._backend.compile)
            if code is not None:
                counters["lifted_numbers"] += 1
                return code, None
        return super()._code(traced, args)

    def run_in_modes(self, args: list[Any], left: LeakedModes) -> Sequence[Any]:
        """As `run`, where user code has left modes switched for a part of the segment."""
        return step_through(self._segment, args, left.around)

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        if profiling():
            return step_through(self._segment, args, self._log.node_ranges)
        return self._run_as_captured(args)

    def _run(self, lowered: Lowered, args: list[Any], flat: list[Any]) -> Sequence[Any]:
        if not profiling():
            return super()._run(lowered, args, flat)
        with self._log.segment_range(self._segment, self._number):
            return super()._run(lowered, args, flat)

    def _run_noted(self, args: list[Any]) -> Sequence[Any]:
        """As captured, while it is traced: ATen nodes get the names of their autograd nodes."""
        return step_through(self._segment, args, self._log.node_noted)


def runner_of(segment: Segment, number: int, config: Config, backend: Backend, log: PlanLog) -> SegmentRunner:
    """A runner for the segment: that of an equal segment in the same place of an earlier plan, if there was
    one; else a new one, which shares the code of equal segments in other places. The arguments are those of
    `SegmentRunner`."""
    structure = structure_of(segment.nodes, segment.inputs, segment.outputs)
    if structure is None or _why_interpreted(segment, backend) is not None:
        return SegmentRunner(segment, number, config, backend, log)
    shared, _ = lowerings.get((config, structure), Lowerings)
    family, _ = families.get((config, family_of(structure)), Family)

    def make() -> SegmentRunner:
        return SegmentRunner(segment, number, config, backend, log, shared, family)

    # The runner knows its calls by node call: for profilers, and for modes that hooks leave switched.
    node_calls = tuple(call_of(node).node_call for node in segment.nodes)
    runner, is_new = runners.get((config, number, structure, node_calls), make)
    assert isinstance(runner, SegmentRunner)
    if not is_new:
        log.lowered(
            LoweringReport(number, backend.name, "", "shared with an earlier backward's equal segment")
        )
    return runner


def _why_interpreted(segment: Segment, backend: Backend) -> str | None:
    if not backend.traces:
        return f"backend {backend.name} interprets"
    if segment.interpret_because:
        return segment.interpret_because
    return None if segment.worth_compiling else "nothing in it is worth compiling"


def _names(segment: Segment) -> tuple[str, ...]:
    return tuple(getattr(node.target, "__name__", str(node.target)) for node in segment.nodes)
