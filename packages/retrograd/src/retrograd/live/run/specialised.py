"""A plan that is specialised: its segments have their code, and what is left is to call one after the other.

In: a `Plan` that has run before, and one more run of it, watched by a `Specialising`. Out: a
`SpecialisedPlan`, whose steps are one generated function (see `live.run.generated_source`) behind one guard.
Where a step needs more than that (a guard that fails, a hook that registers a hook, a mode left switched, a
saved tensor that was changed), the function hands over to the plan in the middle.

What need not be asked again in each segment: before any user code has run, a segment's inputs are what the
engine collected and what static code made of it. After user code, segments ask their own guards, and saved
tensors are checked for changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from retrograd._torch.autograd import Collected, HookChanges, LiveBackward, Versions
from retrograd._torch.state import ThreadModes, UserCode, are_modes_plain, without_torch_functions
from retrograd._torch.trace import InputGuard
from retrograd.backends.base import Boxed
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import Accumulation, OpaqueCall, Schedule, Segment, Source, SourceKind
from retrograd.live.run.generated_source import Check, Code, GeneratedSource, PlanLayout
from retrograd.live.run.segment_runner import LeakedModes, SegmentRunner

Values = dict[fx.Node, Any]
Record = Callable[..., Boxed]
Runners = Sequence[SegmentRunner | None]


@dataclass
class PlanRun:
    """One run of a plan that goes from step to step, from its beginning or from where it was handed over.

    Attributes:
        values: those that later steps read. versions: of saved tensors, as they should be.
        backward, changes: as in `Plan.run`.
        start: the number of the step that is next.
        left: modes that user code left switched.
        watch: watches the run, to specialise the plan; None if it is not watched.
    """

    values: Values
    versions: Versions
    backward: LiveBackward
    changes: HookChanges
    start: int = 0
    left: LeakedModes | None = None
    watch: Specialising | None = None


class SpecialisedPlan:
    """The steps of one plan, for values and modes like those of one run."""

    def __init__(self, layout: PlanLayout, runners: Runners) -> None:
        counters["specialised_plans"] += 1
        self.layout = layout
        self._compiled = tuple(runner for runner in runners if runner and not runner.is_interpreted)
        steps = enumerate(layout.schedule.steps)
        self._calls = tuple(number for number, step in steps if isinstance(step, OpaqueCall))
        self._modes = ThreadModes.now()
        self._written = GeneratedSource(layout)
        self._code = self._written.emit.function()
        self.bailouts = 0

    def run(
        self, call: Collected, backward: LiveBackward, changes: HookChanges
    ) -> list[torch.Tensor | None] | PlanRun | None:
        """Run all steps.

        Returns:
            The plan's outputs; a run that must go on in the plan; or None if the plan is not specialised for
            these values and modes: then what the engine collected is still there.
        """
        if ThreadModes.now() != self._modes or not are_modes_plain():
            return None
        for runner in self._compiled:
            if runner.lowerer.interpret_because is not None:  # its code has failed elsewhere
                return None
        user = UserCode(self._modes) if self._calls else None
        result = self._code(call, backward, changes, user)
        if result is None:
            return None
        if type(result) is list:
            counters["specialised_runs"] += 1
            counters["opaque_calls"] += len(self._calls)
            return result
        step, found = result
        self.bailouts += 1
        counters["bailouts"] += 1
        counters["opaque_calls"] += sum(number < step for number in self._calls)
        versions = Versions(
            (node, found["versions"][place])
            for number, watched in self._written.watched.items()
            if number >= step
            for place, node in watched
        )
        values = {node: found[name] for node, name in self._written.emit.local.items() if name in found}
        found.clear()
        left = user.left if user else None
        modes = None if left is None else LeakedModes(self.layout.schedule.steps[step - 1].node, left)
        return PlanRun(values, versions, backward, changes, step, modes)


class Specialising:
    """Watches one run of a plan, to specialise it for values like those of this run.

    Args:
        layout: of the plan. runners: of its segments, by step.
        record: given a function of all segments and the graphs that they were compiled from, returns one that
            is replayed as a CUDA graph where that is safe; None if that is not wanted.
    """

    def __init__(self, layout: PlanLayout, runners: Runners, record: Record | None = None) -> None:
        self._layout, self._runners, self._record = layout, runners, record
        self._known = _known_from_the_start(layout.schedule, runners)
        self._seen = 0
        self._codes: dict[int, Code] = {}
        self._graphs: dict[fx.Graph, None] = {}
        self._failed = False

    @without_torch_functions
    def begin(self, values: Values) -> None:
        """The run begins with these values."""
        steps = self._layout.schedule.steps
        read = (node for i in sorted(self._known) for node in steps[i].inputs)  # type: ignore[union-attr]
        guarded = tuple(node for node in dict.fromkeys(read) if node.op == "placeholder")
        if guarded:
            try:
                guard = InputGuard([values[node] for node in guarded], (), (), None)
            except Exception:  # a value of which no guard can speak
                self._failed = True
            else:
                self._layout = replace(self._layout, guard=_answering(guard.check), guarded=guarded)

    def see(self, number: int, args: list[Any]) -> None:
        """Step `number`, a segment, is about to run with these values."""
        runner = self._runners[number]
        self._seen += 1
        if self._failed or runner is None or runner.is_interpreted:
            return
        try:
            code = self._code_of(number, runner, args)
        except Exception:  # the run itself says what is wrong with a guard
            code = None
        self._failed = code is None
        if code is not None:
            self._codes[number] = code

    def _code_of(self, number: int, runner: SegmentRunner, args: list[Any]) -> Code | None:
        lowered = runner.direct_code(args)
        if lowered is None or (number in self._known and not lowered.guard.is_static):
            return None
        self._graphs[lowered.graph] = None
        check = None if number in self._known else _answering(lowered.guard.check)
        given = tuple(place is not None for place in lowered.given)
        return Code(runner.code_of(lowered), lowered.fed, given, check, runner.failed)

    def specialised(self) -> SpecialisedPlan | None:
        """The plan, specialised; None if a segment has to decide in each run what it runs."""
        if self._failed or self._seen < len(self._layout.schedule.segments):  # hooks that came cut it short
            return None
        layout, record = replace(self._layout, codes=self._codes), self._record
        try:
            if record is not None:  # one recording of all segments, in place of one for each
                layout = joined(layout, lambda run: record(run, *self._graphs)) or layout
            return SpecialisedPlan(layout, self._runners)
        except Exception:
            live_log.exception("a plan is not specialised")
            return None


def _answering(check: Check) -> Check:
    """`check`, where an error means no: the plan will meet the error again, and report it."""

    def holds(args: Sequence[Any]) -> bool:
        try:
            return check(args)
        except Exception:
            return False

    return holds


def _known_from_the_start(schedule: Schedule, runners: Runners) -> frozenset[int]:
    """The segments whose inputs are known when those of the plan are: before them there is no user code, no
    symbolic size, and nothing that is not compiled."""
    known: list[int] = []
    for number, (step, runner) in enumerate(zip(schedule.steps, runners, strict=True)):
        is_dark = runner is not None and (runner.is_interpreted or not runner.lowerer.is_static)
        if is_dark or isinstance(step, OpaqueCall):
            break
        if runner is not None:
            known.append(number)
    return frozenset(known)


def joined(layout: PlanLayout, changed: Callable[[Boxed], Boxed]) -> PlanLayout | None:
    """The plan with one function in place of its segments; None if something has to run between them, or if
    a segment is not compiled or asks a guard of its own.

    Args:
        layout: the plan with its code.
        changed: given the function of all segments, returns what is to run, for example a recording of it.
            The function reads and writes nothing but its values. It takes a list of values, which it empties,
            and returns the gradients that are accumulated, then the plan's outputs. A gradient to which
            somebody keeps a reference is copied into ``.grad``; others are stolen.
    """
    steps, segments = layout.schedule.steps, layout.schedule.segments
    codes = [code for _, code in sorted(layout.codes.items()) if code.check is None]
    if any(isinstance(step, OpaqueCall) for step in steps) or len(codes) < len(segments):
        return None
    made = {node for step in segments for node in step.outputs}
    accumulations = [step for step in steps if isinstance(step, Accumulation)]
    wanted = (*(step.node.args[1] for step in accumulations), *layout.outputs)
    gives = tuple(dict.fromkeys(node for node in wanted if isinstance(node, fx.Node) and node in made))
    takes = tuple(dict.fromkeys(node for step in segments for node in step.inputs if node not in made))
    inner = replace(
        layout,
        placeholders=[(node, Source(SourceKind.INPUT, i)) for i, node in enumerate(takes)],
        lengths={kind: len(takes) if kind is SourceKind.INPUT else 0 for kind in SourceKind},
        outputs=gives,
        guard=None,
    )
    function = GeneratedSource(inner.with_steps(segments, codes)).emit.function()

    def run(values: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = function(Collected(None, values, [], [], [], []), None, None, None)
        return results

    nodes = tuple(node for step in segments for node in step.nodes)
    whole = Segment(nodes, takes, gives, worth_compiling=True)
    # The segment that raises tells of it.
    code = Code(changed(run), tuple(range(len(takes))), (True,) * len(gives), None, lambda error: None)
    return layout.with_steps([whole, *accumulations], [code])
