"""Run a backward step by step.

In: a `BackwardGraph` in eager's order, and at run time what the engine collected. Out: the gradients that
``autograd.grad`` returns, and ``.grad`` written. Values are freed as soon as their last step has read them.

A plan that runs again is specialised: its steps become one generated function. To generate it takes as long
as several runs that go from step to step. So a plan is not generated for its first run, nor is the rest of a
backward in which a hook came or went: many plans of both kinds run only once.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd._torch.autograd import Collected, HookChanges, LiveBackward, Versions, versions_of, watching
from retrograd._torch.cuda import user_code_in_order
from retrograd._torch.log import profiling
from retrograd._torch.state import ModesKept, are_modes_plain
from retrograd.backends.background import pending, take_finished
from retrograd.backends.base import Backend
from retrograd.backends.registry import EagerBackend
from retrograd.config import Config
from retrograd.cudagraphs.graphed_function import graphed
from retrograd.errors import Reason
from retrograd.events import counters
from retrograd.graph.backward_graph import (
    Accumulation,
    BackwardGraph,
    CallKind,
    OpaqueCall,
    Schedule,
    Segment,
    Source,
    SourceKind,
    call_name,
    call_of,
    source_of,
)
from retrograd.live.calls.gradients import accumulate_grad
from retrograd.live.calls.user_code import ModifiedTensor
from retrograd.live.capture.cut import changing_numbers, cut
from retrograd.live.run.generated_source import PlanLayout, is_only_for_post_hooks, lists_of
from retrograd.live.run.mid_backward_hooks import rest_with_changes
from retrograd.live.run.segment_runner import LeakedModes, SegmentRunner, runner_of
from retrograd.live.run.specialised import PlanRun, SpecialisedPlan, Specialising, Values
from retrograd.repeats.divide import regions_of
from retrograd.report import BackwardReport, PlanLog

#: from this many copies of a region on, a segment that is no copy is compiled later, if it makes up no more
#: than one part in this many of the backward.
REGION_RULES = 6

#: how often it is interpreted until then.
RUNS_OF_THE_REST = 4

_RARE = "a small part of this backward that is met once in it: compiled when the backward has run a few times"

_NOTHING = nullcontext()

_NONE: Mapping[str, str] = MappingProxyType({})

#: for plans without user code, which alone could change a hook.
_NO_CHANGES = nullcontext(HookChanges())

#: this many runs go from step to step, the last of them watched.
SPECIALISED_AFTER = 1

#: for how many kinds of values and modes a plan is specialised, how often that is tried, and after how many
#: bailouts a specialised plan is dropped.
KEPT_SPECIALISED, ATTEMPTS, BAILOUTS_BEFORE_DROPPED = 4, 16, 8


class Plan:
    """The steps of one backward, with the code of its segments.

    Attributes:
        schedule: the steps. report, log: of them.
        runs_user_code: whether a step calls something that can look at the running backward.
        raised: calls that could not be traced, by name, with what they raised.
        is_outdated: whether some of them stand in segments, which are interpreted for that. In a plan that is
            told of them they stand apart, and the rest is compiled.
    """

    def __init__(
        self, graph: BackwardGraph, config: Config, backend: Backend, raised: Mapping[str, str] = _NONE
    ) -> None:
        counters["plans"] += 1
        self._graph, self.raised, self.is_outdated = graph, raised, False
        self.schedule = _schedule(graph, config, backend, raised)
        self.runs_user_code = bool(self.schedule.opaque_calls)
        self.report = BackwardReport(graph, self.schedule, backend.name)
        self.log = PlanLog(self.report)
        # Where no user code stands between segments, all of them are recorded together.
        self._records = config.cudagraphs and not self.runs_user_code
        own = replace(config, cudagraphs=False) if self._records else config
        number = itertools.count()
        self._layout = PlanLayout(
            self.schedule, tuple(graph.placeholders()), graph.outputs(), _saved_tensors(graph)
        )
        self._runners = tuple(
            runner_of(step, next(number), own, backend, self.log) if isinstance(step, Segment) else None
            for step in self.schedule.steps
        )
        self._specialised: list[SpecialisedPlan] = []
        self._attempts = 0
        _postpone_the_rest(self.schedule, self._runners)

    def given_up(self) -> list[Reason]:
        """Why segments that were to be compiled are interpreted from now on."""
        found = (runner.lowerer.given_up for runner in self._runners if runner is not None)
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    def postpone(self, because: str) -> None:
        """Interpret in the next run what is not compiled yet."""
        for runner in filter(None, self._runners):
            runner.postpone(because)

    def run(self, call: Collected, backward: LiveBackward) -> list[torch.Tensor | None]:
        """Run all steps."""
        if pending:
            take_finished()
        self.report.runs += 1
        counters["runs"] += 1
        with watching() if self.runs_user_code else _NO_CHANGES as changes:
            result = self._run_specialised(call, backward, changes)
            if result is not None:
                return result
            watch = self._watch(call)
            return self._run_steps(call, backward, changes, watch)

    def _run_specialised(
        self, call: Collected, backward: LiveBackward, changes: HookChanges
    ) -> list[Any] | None:
        """What the plan returns; None if it is not specialised for these values and modes."""
        for plan in self._specialised:
            result = plan.run(call, backward, changes)
            if isinstance(result, PlanRun):
                if plan.bailouts >= BAILOUTS_BEFORE_DROPPED:
                    self._specialised = [other for other in self._specialised if other is not plan]
                return self._rest(result.start - 1, result) if changes else self._steps(result)
            if result is not None:
                return result
        return None

    def _watch(self, call: Collected) -> Specialising | None:
        """What watches this run, if the plan may be specialised after it."""
        if self.report.runs <= SPECIALISED_AFTER or self._attempts >= ATTEMPTS or torch.is_grad_enabled():
            return None
        if not are_modes_plain() or any(runner.is_waiting for runner in self._runners if runner is not None):
            return None
        self._attempts += 1
        record = partial(graphed, tell=self.log.noted) if self._records else None
        lengths = {kind: len(values) for kind, values in lists_of(call).items()}
        return Specialising(replace(self._layout, lengths=lengths), self._runners, record)

    def _run_steps(
        self, call: Collected, backward: LiveBackward, changes: HookChanges, watch: Specialising | None
    ) -> list[Any]:
        values = _bound(self._layout.placeholders, call)
        if watch is not None:
            watch.begin(values)
        saved = tuple(self._layout.saved)
        versions = Versions(zip(saved, versions_of([values[node] for node in saved]), strict=True))
        run = PlanRun(values, versions, backward, changes, watch=watch)
        del values
        results = self._steps(run)
        self._note_raised()
        if watch is not None and (plan := watch.specialised()) is not None:
            self._specialised = [plan, *self._specialised][:KEPT_SPECIALISED]
        return results

    def _note_raised(self) -> None:
        shared = [runner.shared for runner in self._runners if runner is not None]
        new = {one.raised_in: one.interpret_because or "" for one in shared if one.raised_in is not None}
        self.is_outdated = not new.keys() <= self.raised.keys()
        self.raised = {**self.raised, **new}

    def _steps(self, run: PlanRun) -> list[Any]:
        values, versions, left = run.values, run.versions, run.left
        for number in range(run.start, len(self.schedule.steps)):
            step, dying = self.schedule.steps[number], self.schedule.dying[number]
            if isinstance(step, Segment):
                runner = self._runners[number]
                assert runner is not None
                for error in versions.changed(step.inputs, values).values():
                    raise RuntimeError(error)
                args = [values.pop(node) if node in dying else values[node] for node in step.inputs]
                if run.watch is not None:
                    run.watch.see(number, args)
                # The results are bound to no name here: that would be a reference, and `.grad` is not stolen.
                if left is not None and left.reach(step):
                    values.update(zip(step.outputs, runner.fn.through(args, left.around), strict=True))
                else:
                    values.update(zip(step.outputs, runner.run(args), strict=True))
                continue
            with (
                self.log.step_range(step) if profiling() else _NOTHING,
                left.around(step.node) if left else _NOTHING,
            ):
                if isinstance(step, Accumulation):
                    _accumulate(step, dying, values)
                    continue
                run.backward.node_call = call_of(step.node).node_call
                run.left = left = _call(step, dying, values, versions) or left
            if run.changes:
                return self._rest(number, run)
        return [None if node is None else values[node] for node in self._layout.outputs]

    def _rest(self, number: int, run: PlanRun) -> list[Any]:
        """Hooks came or went: lay out the remaining steps again, and interpret them."""
        done = self.schedule.steps[: number + 1]
        graph, rest = rest_with_changes(self._graph, done, run.values, run.backward, run.changes)
        versions = run.versions.renamed(zip(run.values, rest, strict=False))
        run.values.clear()
        plan = Plan(graph, Config(backend="eager"), EagerBackend())
        return plan._steps(PlanRun(rest, versions, run.backward, run.changes, left=run.left))


def _schedule(graph: BackwardGraph, config: Config, backend: Backend, raised: Mapping[str, str]) -> Schedule:
    named = _calls_named(graph, dict.fromkeys(config.opaque, "named in opaque="))
    if not backend.traces:
        return cut(graph, named, at_once=True)
    smallest = config.smallest_repeat
    divide = partial(regions_of, smallest=smallest, copies=config.fewest_copies) if smallest else None
    return cut(graph, named, changing_numbers(graph) | _calls_named(graph, raised), divide)


def _calls_named(graph: BackwardGraph, reasons: Mapping[str, str]) -> dict[fx.Node, str]:
    """The functional calls whose names have a reason, with it."""
    if not reasons:
        return {}
    names = {node: call_name(node) for node, call in graph.calls() if call.kind.is_functional}
    return {node: reasons[name] for node, name in names.items() if name in reasons}


def _postpone_the_rest(schedule: Schedule, runners: Sequence[SegmentRunner | None]) -> None:
    """Where one region makes up most of a backward, a part that is met only once, and is small, waits:
    compiling it takes as long as compiling the region, and pays little."""
    found = [runner for runner in runners if runner is not None]
    shared = [id(runner.shared) for runner in found]
    copies = Counter(shared)
    if max(copies.values(), default=0) < REGION_RULES:
        return
    total = sum(len(segment.nodes) for segment in schedule.segments)
    for segment, runner, key in zip(schedule.segments, found, shared, strict=True):
        if copies[key] == 1 and len(segment.nodes) * REGION_RULES <= total:
            runner.postpone(_RARE, RUNS_OF_THE_REST)


def _bound(placeholders: Sequence[tuple[fx.Node, Source]], call: Collected) -> Values:
    """The values of the placeholders; those that are not read are freed at once."""
    lists = lists_of(call)
    values = {node: lists[source.kind][source.index] for node, source in placeholders if node.users}
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
    step: OpaqueCall, dying: frozenset[fx.Node], values: Values, versions: Versions
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
    args = fx.map_arg(step.node.args, read.__getitem__)
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
