"""A plan that has settled: its segments have their code, and what is left is to call one after the other.

In: a `Plan` that has run before, and one more run of it, watched by a `Specialising`. Out: a
`SpecialisedPlan`, whose steps are one generated function (see `live.run.generated_source`) behind one guard.
Where a step needs more than that (a guard that fails, a hook that registers a hook, a mode left switched, a
saved tensor that was changed), the function hands over to the plan in the middle.

What need not be asked anew in each segment: before any user code has run, a segment's inputs are what the
engine collected and what static code made of it. After user code, segments ask their own guards, and saved
tensors are looked at for changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from retrograd._torch.autograd import Collected, HookChanges, Versions
from retrograd._torch.state import KeptModes, ThreadModes, UserCode, are_modes_plain, without_torch_functions
from retrograd._torch.trace import InputGuard
from retrograd.backends.base import Boxed
from retrograd.events import counters, live_log
from retrograd.graph.backward_graph import OpaqueCall, Schedule, Segment, Source, SourceKind
from retrograd.live.lower.lowered import Lowered
from retrograd.live.lower.lowerer import BoxedRunner
from retrograd.live.run.generated_source import Check, Code, GeneratedSource, PlanLayout, write
from retrograd.live.run.running_backward import RunningBackward
from retrograd.live.run.whole_backward_function import joined

Values = dict[fx.Node, Any]
Record = Callable[..., Boxed]
Runners = Sequence[BoxedRunner | None]


@dataclass
class Bailout:
    """A run that must go on in the plan.

    Attributes:
        step: the number of the step that is next.
        values: those at hand. versions: of saved tensors, as they should be.
        modes: what the last call of user code left switched; None if nothing.
    """

    step: int
    values: Values
    versions: Versions[fx.Node]
    modes: KeptModes | None


class SpecialisedPlan:
    """The steps of one plan, for values and modes like those of one run.

    Args:
        laid: the plan with its code. A plan without opaque calls may first be given other code for all of its
            segments together: ``joined(laid).around(run)`` (see `live.run.whole_backward_function`).
        runners: by step of the plan; whose code it is. None for steps that are no segments.

    Attributes:
        laid, runners: as given.
        left: how often a run had to go on in the plan.
    """

    def __init__(self, laid: PlanLayout, runners: Runners) -> None:
        counters["settled_plans"] += 1
        self.laid, self.runners = laid, runners
        self._compiled = tuple(runner for runner in runners if runner and not runner.is_interpreted)
        steps = enumerate(laid.schedule.steps)
        self._calls = tuple(number for number, step in steps if isinstance(step, OpaqueCall))
        self._modes = ThreadModes.now()
        self._written: GeneratedSource = write(laid)
        self._code = self._written.emit.function()
        self.left = 0

    def run(
        self, call: Collected, running: RunningBackward, changes: HookChanges
    ) -> list[torch.Tensor | None] | Bailout | None:
        """Run all steps.

        Args:
            call: what the engine collected; its lists are emptied, unless None is returned.
            running: told which node call user code runs for.
            changes: hooks that came or went, as far as this backward is concerned.

        Returns:
            The plan's outputs; a `Bailout`; or None if the plan is not settled for these values and modes.
        """
        if ThreadModes.now() != self._modes or not are_modes_plain() or self._is_distrusted():
            return None
        user = UserCode(self._modes) if self._calls else None
        try:
            result = self._code(call, running, changes, user)
        except Exception as error:
            self._blame(error)
            raise
        if result is None:
            return None
        if type(result) is list:
            counters["settled_runs"] += 1
            counters["opaque_calls"] += len(self._calls)
            return result
        step, found = result
        self.left += 1
        counters["settled_runs_left"] += 1
        counters["opaque_calls"] += sum(number < step for number in self._calls)
        return self._left(step, found, user.left if user else None)

    def _is_distrusted(self) -> bool:
        """Whether code of one of its segments has failed elsewhere."""
        return any(runner.is_interpreted for runner in self._compiled)

    def _blame(self, error: Exception) -> None:
        """If compiled code has failed, its segment is interpreted from now on."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self._code.__code__:
            trace = trace.tb_next
        step = None if trace is None else self._written.steps.get(trace.tb_lineno)
        if step is not None and self.laid.codes[step].is_compiled:
            runner = self.runners[step]
            if runner is not None:
                runner.failed(error)

    def _left(self, step: int, found: dict[str, Any], modes: KeptModes | None) -> Bailout:
        versions = Versions(
            pair
            for number, watched in self._written.watched.items()
            if number >= step
            for pair in ((node, found["versions"][place]) for place, node in watched)
        )
        values = self._written.values(found)
        found.clear()
        return Bailout(step, values, versions, modes)


class Specialising:
    """Watches one run of a plan, to settle it for values like those of this run.

    Args:
        schedule, placeholders, outputs, saved: of the plan. runners: of its segments, by step.
        call: the run's values, not yet bound.
        record: given a function of all segments and the graphs that they were compiled from, returns one that
            is replayed as a CUDA graph where that is safe; None if that is not wanted.
    """

    def __init__(  # noqa: PLR0913 - a plan's parts, and one run of it
        self,
        schedule: Schedule,
        placeholders: Sequence[tuple[fx.Node, Source]],
        outputs: Sequence[fx.Node | None],
        saved: frozenset[fx.Node],
        runners: Runners,
        call: Collected,
        record: Record | None = None,
    ) -> None:
        self._schedule, self._runners, self._record = schedule, runners, record
        self._placeholders, self._outputs, self._saved = placeholders, outputs, saved
        self._lengths = {
            SourceKind.INPUT: len(call.inputs),
            SourceKind.SIZE: len(call.sizes),
            SourceKind.SCALAR: len(call.scalars),
            SourceKind.HOOK: len(call.hooks),
            SourceKind.PACKED: len(call.packed),
        }
        self._known = _known_from_the_start(schedule, runners)
        self._guarded: tuple[fx.Node, ...] = ()
        self._guard: InputGuard | None = None
        self._codes: dict[int, Code] = {}
        self._lowered: dict[int, Lowered] = {}
        self._failed = False

    @without_torch_functions
    def begin(self, values: Values) -> None:
        """The run begins with these values."""
        read = (node for i in sorted(self._known) for node in self._schedule.steps[i].inputs)  # type: ignore[union-attr]
        self._guarded = tuple(node for node in dict.fromkeys(read) if node.op == "placeholder")
        if self._guarded:
            guarded = [values[node] for node in self._guarded]
            try:
                self._guard = InputGuard(guarded, (), (), None)
            except Exception:  # a value of which no guard can speak
                self._failed = True

    def see(self, number: int, args: list[Any]) -> None:
        """Step `number`, a segment, is about to run with these values."""
        if self._failed:
            return
        try:
            code = self._code_of(number, args)
        except Exception:  # the run itself says what is wrong with a guard
            code = None
        self._failed = code is None
        if code is not None:
            self._codes[number] = code

    def at_once(self) -> SpecialisedPlan | None:
        """The plan, settled without a run, if none of its segments is ever compiled."""
        if self._known or not all(runner is None or runner.is_interpreted for runner in self._runners):
            return None
        for number, runner in enumerate(self._runners):
            if runner is not None:
                self.see(number, [])
        return self.settled()

    def _code_of(self, number: int, args: list[Any]) -> Code | None:
        runner, step = self._runners[number], self._schedule.steps[number]
        assert runner is not None
        assert isinstance(step, Segment)
        if runner.is_interpreted:
            everything = tuple(range(len(step.inputs)))
            return Code(runner.captured, everything, (True,) * len(step.outputs), None, is_compiled=False)
        lowered = runner.direct_code(args)
        if lowered is None or (number in self._known and not lowered.guard.is_static):
            return None
        self._lowered[number] = lowered
        check = None if number in self._known else _answering(lowered.guard.check)
        given = tuple(place is not None for place in lowered.given)
        return Code(runner.code_of(lowered), lowered.fed, given, check, is_compiled=True)

    def settled(self) -> SpecialisedPlan | None:
        """The plan, settled; None if it cannot be: a segment has to decide when it runs what it runs."""
        if self._failed or len(self._codes) < len(self._schedule.segments):  # hooks that came cut it short
            return None
        laid = PlanLayout(
            self._schedule,
            self._codes,
            self._placeholders,
            self._lengths,
            self._outputs,
            None if self._guard is None else _answering(self._guard.check),
            self._guarded,
            self._saved,
        )
        try:
            return SpecialisedPlan(self._recorded(laid), self._runners)
        except Exception:
            live_log.exception("a plan does not settle")
            return None

    def _recorded(self, laid: PlanLayout) -> PlanLayout:
        """The plan with one recording of all its segments, if there can be one, in place of one for each."""
        if self._record is None or self._lowered.keys() != laid.codes.keys():
            return laid
        codes = {number: replace(code, run=self._lowered[number].run) for number, code in laid.codes.items()}
        whole = joined(replace(laid, codes=codes))
        if whole is None:
            return laid
        graphs = dict.fromkeys(lowered.graph for lowered in self._lowered.values())
        return whole.around(self._record(whole.run, *graphs))


def _answering(check: Check) -> Check:
    """`check`, where an error means no: the plan finds it again, and says so."""

    def holds(args: Sequence[Any]) -> bool:
        try:
            return check(args)
        except Exception:
            return False

    return holds


def _known_from_the_start(schedule: Schedule, runners: Runners) -> frozenset[int]:
    """The segments whose inputs are known when those of the plan are: no user code, no symbolic size, and
    nothing that is not compiled stands before them."""
    known: list[int] = []
    for number, (step, runner) in enumerate(zip(schedule.steps, runners, strict=True)):
        if isinstance(step, OpaqueCall):
            break
        if isinstance(step, Segment):
            assert runner is not None
            if runner.is_interpreted or not runner.is_static:
                break
            known.append(number)
    return frozenset(known)
