"""Joins all segments of a plan into one function, which is recorded as one CUDA graph.

In: a `PlanLayout` without user code, all of whose segments are to be compiled. Out: a layout in which one
step runs all segments. That step runs them one after the other until each has code that depends only on
sizes, strides and modes. From then on it replays one recording of this code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from retrograd.cudagraphs.graphed_function import graphed
from retrograd.engine import Collected
from retrograd.graph.backward_graph import Accumulation, Segment, Source, SourceKind
from retrograd.graph.emit import Boxed
from retrograd.live.lower.lowerer import Lowered
from retrograd.live.plan_log import PlanLog
from retrograd.live.run.generated_source import GeneratedSource, PlanLayout
from retrograd.live.run.segment_runner import SegmentRunner
from retrograd.runtime.modes import ThreadModes, are_modes_plain
from retrograd.trace import InputGuard

#: For at most this many combinations of values and modes we record the segments together, and we try at most
#: this many times.
MOST_RECORDED, ATTEMPTS = 4, 16


def fused(layout: PlanLayout, runners: Sequence[SegmentRunner], log: PlanLog) -> PlanLayout | None:
    """The layout with one segment; None if a segment is not to be compiled, or there is none.

    The segment's function reads and writes nothing but its values. It returns the gradients to accumulate,
    then the plan's outputs. A gradient with another reference is copied into ``.grad``; others are stolen.
    """
    segments = layout.schedule.segments
    if not segments or len(runners) < len(segments):
        return None
    made = {node for step in segments for node in step.outputs}
    accumulations = [step for step in layout.schedule.steps if isinstance(step, Accumulation)]
    wanted = (*(step.node.args[1] for step in accumulations), *layout.outputs)
    gives = tuple(dict.fromkeys(node for node in wanted if isinstance(node, fx.Node) and node in made))
    takes = tuple(dict.fromkeys(node for step in segments for node in step.inputs if node not in made))
    inner = replace(
        layout,
        placeholders=[(node, Source(SourceKind.INPUT, i)) for i, node in enumerate(takes)],
        outputs=gives,
        saved=frozenset(),
    )

    def one_after_the_other(runs: Sequence[Boxed]) -> Boxed:
        function = GeneratedSource(inner.with_steps(segments, runs)).function
        return lambda values: function(Collected(None, values, [], [], [], []), None, None, None)

    nodes = tuple(node for step in segments for node in step.nodes)
    whole = Segment(nodes, takes, gives, worth_compiling=True)
    return layout.with_steps([whole, *accumulations], [_Fused(one_after_the_other, runners, log).run])


@dataclass(frozen=True)
class _Recorded:
    """The code of all segments, and the guards for its use."""

    guard: InputGuard
    modes: ThreadModes
    run: Boxed


class _Fused:
    """Runs all segments.

    Args:
        join: joins the functions of all segments into one.
        runners: the runners of the segments.
        log: receives what is not recorded.
    """

    def __init__(
        self, join: Callable[[Sequence[Boxed]], Boxed], runners: Sequence[SegmentRunner], log: PlanLog
    ) -> None:
        self._join, self._runners, self._log = join, runners, log
        self._run_each = join([runner.run for runner in runners])
        self._recorded: list[_Recorded] = []
        self._attempts = 0

    def run(self, args: list[Any]) -> Sequence[Any]:
        """Compute the outputs. `args` is emptied."""
        modes = ThreadModes.now()
        may_be_recorded = are_modes_plain() and not any(one.is_interpreted for one in self._runners)
        for recorded in self._recorded if may_be_recorded else ():
            if recorded.modes == modes and recorded.guard.check(args):
                return recorded.run(args)
        guard = self._guard(args) if may_be_recorded else None
        for runner in self._runners:
            runner.ran = None
        results = self._run_each(args)
        ran = [(one, one.ran) for one in self._runners if one.ran is not None and one.ran.guard.is_static]
        if guard is not None and len(ran) == len(self._runners):
            self._attempts += 1
            graphs = dict.fromkeys(lowered.graph for _, lowered in ran)
            code = self._join([partial(_run_code, runner, lowered) for runner, lowered in ran])
            recorded = _Recorded(guard, modes, graphed(code, *graphs, tell=self._log.recorded))
            self._recorded = [recorded, *self._recorded][:MOST_RECORDED]
        return results

    def _guard(self, args: list[Any]) -> InputGuard | None:
        if self._attempts >= ATTEMPTS:
            return None
        try:
            return InputGuard(args, (), (), None)
        except Exception:  # a value that no guard can check
            return None


def _run_code(runner: SegmentRunner, lowered: Lowered, args: list[Any]) -> Sequence[Any]:
    return runner.run_code(lowered, args, args, lowered.run)
