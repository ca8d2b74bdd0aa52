"""Run a backward step by step.

In: a `BackwardGraph` in eager's order, and at run time what the engine collected. Out: the gradients that
``autograd.grad`` returns, and ``.grad`` written. Values are let go as soon as their last step has read them.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from retrograd._torch.autograd import Collected, HookChanges, Versions, versions_of, watching
from retrograd._torch.cuda import user_code_in_order
from retrograd._torch.log import profiling
from retrograd._torch.state import ModesKept, are_modes_plain
from retrograd.backends.background import take_finished
from retrograd.backends.base import Backend
from retrograd.backends.registry import EagerBackend
from retrograd.config import Config
from retrograd.cudagraphs.graphed_call import graphed
from retrograd.events import counters
from retrograd.graph.backward_graph import (
    Accumulation,
    BackwardGraph,
    CallKind,
    OpaqueCall,
    Schedule,
    Segment,
    SourceKind,
    call_of,
    source_of,
)
from retrograd.live.calls.gradients import accumulate_grad
from retrograd.live.calls.saved import ModifiedTensor
from retrograd.live.capture.cut import cut, whole
from retrograd.live.lower.pieces import regions_of
from retrograd.live.lower.sharing import changing_numbers
from retrograd.live.plan_log import PlanLog
from retrograd.live.run.generated_source import is_only_for_post_hooks
from retrograd.live.run.leaked_modes import LeakedModes
from retrograd.live.run.mid_backward_hooks import rest_with_changes
from retrograd.live.run.running_backward import RunningBackward
from retrograd.live.run.segment_runner import runner_of
from retrograd.live.run.specialised import Bailout, SpecialisedPlan, Specialising
from retrograd.live.run.step_through import argument_values
from retrograd.report import BackwardReport

#: from so many copies of a region on, what is no copy, and no larger part of the backward than one in so
#: many, is compiled later.
REGION_RULES = 6

#: how often it is interpreted until then.
RUNS_OF_THE_REST = 4

_RARE = "a small part of this backward that is met once in it: compiled when the backward has run a few times"

Values = dict[fx.Node, Any]

_NOTHING = nullcontext()

#: for plans without user code: nobody can change a hook.
_NO_CHANGES = nullcontext(HookChanges())

#: so many runs go from step to step, the last of them watched.
SETTLES_AFTER = 1

#: for how many kinds of values and modes a plan settles, how often it may try, and how often it may be left
#: in the middle before it is settled anew.
KEPT_SETTLED, ATTEMPTS, LEFT_BEFORE_DROPPED = 4, 16, 8


@dataclass
class _Run:
    """One run of a plan that goes from step to step.

    Attributes:
        values: those that later steps read. versions: of saved tensors, as they should be.
        running, changes: as in `Plan.run`.
        left: modes that user code left switched.
        settling: watches; None if nobody does.
    """

    values: Values
    versions: Versions[fx.Node]
    running: RunningBackward
    changes: HookChanges
    left: LeakedModes | None = None
    settling: Specialising | None = None


class Plan:
    """The steps of one backward, with the code of its segments.

    Args:
        backward: in eager's order.
        config, backend: how segments are lowered.
    """

    def __init__(self, backward: BackwardGraph, config: Config, backend: Backend) -> None:
        counters["plans"] += 1
        self._backward = backward
        smallest = config.smallest_repeat
        self.schedule: Schedule = cut(
            backward,
            _named_opaque(backward, config),
            changing_numbers(backward) if backend.traces else {},
            partial(regions_of, smallest=smallest, copies=config.fewest_copies)
            if backend.traces and smallest
            else whole,
            at_once=not backend.traces,
        )
        self.report = BackwardReport(backward, self.schedule, backend.name)
        self._placeholders = tuple(backward.placeholders())
        self._outputs = backward.outputs()
        self._saved = _saved_tensors(backward)
        number = itertools.count()
        self.log = PlanLog(self.report)
        self._settled: list[SpecialisedPlan] = []
        # Where no user code stands between segments, all of them are recorded together when the plan settles.
        self._attempts, self._records = 0, config.cudagraphs and not self.runs_user_code
        own = replace(config, cudagraphs=False) if self._records else config
        self._runners = tuple(
            runner_of(step, next(number), own, backend, self.log) if isinstance(step, Segment) else None
            for step in self.schedule.steps
        )
        self._postpone_the_rest()

    def _postpone_the_rest(self) -> None:
        """Where one region makes up most of a backward, what is met only once, and is small, waits: compiling
        it takes as long as compiling the region, and pays little."""
        runners = [runner for runner in self._runners if runner is not None]
        copies = Counter(id(runner.shared) for runner in runners)
        if max(copies.values(), default=0) < REGION_RULES:
            return
        total = sum(len(segment.nodes) for segment in self.schedule.segments)
        for segment, runner in zip(self.schedule.segments, runners, strict=True):
            if copies[id(runner.shared)] == 1 and len(segment.nodes) * REGION_RULES <= total:
                runner.postpone(_RARE, RUNS_OF_THE_REST)

    @property
    def runs_user_code(self) -> bool:
        """Whether a step calls something that can look at the running backward."""
        return bool(self.schedule.opaque_calls)

    def postpone(self, because: str) -> None:
        """Interpret in the next run what is not compiled yet."""
        for runner in filter(None, self._runners):
            runner.postpone(because)

    def run(self, call: Collected, running: RunningBackward) -> list[torch.Tensor | None]:
        """Run all steps.

        Args:
            call: what the engine collected; its lists are emptied.
            running: told which node call user code runs for.
        """
        take_finished()
        self.report.runs += 1
        counters["runs"] += 1
        with watching() if self.runs_user_code else _NO_CHANGES as changes:
            result = self._run_settled(call, running, changes)
            if result is not None:
                return result
            settling = self._settling(call)
            if settling is not None and self._keep(settling.at_once()):
                result = self._run_settled(call, running, changes)
            if result is None:
                result = self._ordinarily(call, running, changes, settling)
            return result

    def _run_settled(
        self, call: Collected, running: RunningBackward, changes: HookChanges
    ) -> list[Any] | None:
        """What the plan returns; None if it is not settled for these values and modes."""
        for settled in self._settled:
            result = settled.run(call, running, changes)
            if isinstance(result, Bailout):
                return self._go_on(result, settled, running, changes)
            if result is not None:
                return result
        return None

    def _keep(self, settled: SpecialisedPlan | None) -> bool:
        if settled is None:
            return False
        self._settled = [settled, *self._settled][:KEPT_SETTLED]
        return True

    def _go_on(
        self, bailout: Bailout, settled: SpecialisedPlan, running: RunningBackward, changes: HookChanges
    ) -> list[Any]:
        """From where the settled plan has left a run."""
        if settled.left >= LEFT_BEFORE_DROPPED:
            self._settled = [other for other in self._settled if other is not settled]
        before = self.schedule.steps[bailout.step - 1]
        assert bailout.modes is None or isinstance(before, OpaqueCall)
        modes = None if bailout.modes is None else LeakedModes(before.node, bailout.modes)  # type: ignore[union-attr]
        run = _Run(bailout.values, bailout.versions, running, changes, modes)
        return self._rest(bailout.step - 1, run) if changes else self._steps(run, bailout.step)

    def _ordinarily(
        self, call: Collected, running: RunningBackward, changes: HookChanges, settling: Specialising | None
    ) -> list[Any]:
        values = self._bind(call)
        if settling is not None:
            settling.begin(values)
        versions = Versions(
            zip(self._saved, versions_of([values[node] for node in self._saved]), strict=True)
        )
        run = _Run(values, versions, running, changes, None, settling)
        del values
        results = self._steps(run)
        if settling is not None:
            self._keep(settling.settled())
        return results

    def _settling(self, call: Collected) -> Specialising | None:
        """What watches this run, if the plan may settle in it."""
        if self.report.runs <= SETTLES_AFTER or self._attempts >= ATTEMPTS or torch.is_grad_enabled():
            return None
        if not are_modes_plain() or any(runner.is_waiting for runner in self._runners if runner is not None):
            return None
        self._attempts += 1
        record = partial(graphed, tell=self.log.noted) if self._records else None
        return Specialising(
            self.schedule, self._placeholders, self._outputs, self._saved, self._runners, call, record
        )

    def _steps(self, run: _Run, start: int = 0) -> list[Any]:
        values, versions, left = run.values, run.versions, run.left
        for number, (step, dying, runner) in enumerate(
            zip(
                self.schedule.steps[start:],
                self.schedule.dying[start:],
                self._runners[start:],
                strict=True,
            ),
            start,
        ):
            if isinstance(step, Segment):
                assert runner is not None
                for error in versions.changed(step.inputs, values).values():
                    raise RuntimeError(error)
                args = [values.pop(node) if node in dying else values[node] for node in step.inputs]
                if run.settling is not None:
                    run.settling.see(number, args)
                # The results are bound to no name here: that would be a reference, and `.grad` is not stolen.
                if left is not None and left.reach(step):
                    values.update(zip(step.outputs, runner.run_in_modes(args, left), strict=True))
                else:
                    values.update(zip(step.outputs, runner.run(args), strict=True))
            elif isinstance(step, Accumulation):
                with self._range(step), left.around(step.node) if left else _NOTHING:
                    _accumulate(step, dying, values)
            else:
                run.running.enter(call_of(step.node).node_call)
                with self._range(step), left.around(step.node) if left else _NOTHING:
                    run.left = left = _call(step, dying, values, versions) or left
                if run.changes:
                    return self._rest(number, run)
        return [None if node is None else values[node] for node in self._outputs]

    def _range(self, step: OpaqueCall | Accumulation) -> AbstractContextManager[None]:
        return self.log.step_range(step) if profiling() else _NOTHING

    def _rest(self, number: int, run: _Run) -> list[Any]:
        """Hooks came or went: lay out what is left anew, and interpret it."""
        done = self.schedule.steps[: number + 1]
        backward, rest = rest_with_changes(self._backward, done, run.values, run.running, run.changes)
        versions = run.versions.renamed(zip(run.values, rest, strict=False))
        run.values.clear()
        plan = Plan(backward, Config(backend="eager"), EagerBackend())
        return plan._steps(_Run(rest, versions, run.running, run.changes, run.left))

    def _bind(self, call: Collected) -> Values:
        """Placeholders to values; what nobody reads is let go at once."""
        lists: dict[SourceKind, list[Any]] = {
            SourceKind.INPUT: call.inputs,
            SourceKind.SIZE: call.sizes,
            SourceKind.SCALAR: call.scalars,
            SourceKind.HOOK: call.hooks,
            SourceKind.PACKED: call.packed,
        }
        values = {node: lists[source.kind][source.index] for node, source in self._placeholders if node.users}
        for items in lists.values():
            items.clear()
        return values


def _accumulate(step: Accumulation, dying: frozenset[fx.Node], values: Values) -> None:
    variable_node, grad_node, has_post_hooks = step.node.args
    variable = values[variable_node]  # type: ignore[index]
    # The list is the only reference to the gradient if this is its last use: then it may be stolen.
    box = [values.pop(grad_node) if grad_node in dying else values[grad_node]]  # type: ignore[arg-type,index]
    kept = bool(has_post_hooks) and grad_node in values and is_only_for_post_hooks(step.node)
    accumulate_grad(variable, box, kept)
    for node in dying:
        values.pop(node, None)


def _call(
    step: OpaqueCall, dying: frozenset[fx.Node], values: Values, versions: Versions[fx.Node]
) -> LeakedModes | None:
    """Run an opaque call; returns the modes that it left switched, if it did."""
    counters["opaque_calls"] += 1
    read = values
    if call_of(step.node).kind is CallKind.FUNCTION:
        changed = versions.changed(step.node.all_input_nodes, values)
        read = (
            {**values, **{node: ModifiedTensor(error) for node, error in changed.items()}}
            if changed
            else values
        )
    args = [argument_values(argument, read) for argument in step.node.args]
    del read
    for node in dying:
        values.pop(node, None)
    assert callable(step.node.target)
    with ModesKept() as kept, user_code_in_order():
        result = step.node.target(*args)
    if step.node not in dying:
        values[step.node] = result
    for node in step.projections:
        if node not in dying:
            values[node] = operator.getitem(result, node.args[1])
    return None if kept.left is None else LeakedModes(step.node, kept.left)


def _saved_tensors(backward: BackwardGraph) -> frozenset[fx.Node]:
    """Placeholders that nodes read as saved tensors (not as incoming gradients, nor to write `.grad`)."""
    reads = {CallKind.NODE, CallKind.ATEN, CallKind.CPP_FUNCTION, CallKind.FUNCTION}
    return frozenset(
        value
        for node, call in backward.calls()
        if call.kind in reads
        for value in node.all_input_nodes
        if value.op == "placeholder" and source_of(value).kind is SourceKind.INPUT
    )


def _named_opaque(backward: BackwardGraph, config: Config) -> dict[fx.Node, str]:
    """Calls of the nodes that the user named in ``opaque=``."""
    return {
        node: "named in opaque="
        for node, call in backward.calls()
        if call.kind.is_functional and getattr(node.target, "__name__", "") in config.opaque
    }
