"""Runs a backward step by step.

In: a `BackwardGraph` in eager's order, and at run time what the engine collected. Out: the gradients that
``autograd.grad`` returns; ``.grad`` is written. Values are freed after the last step that reads them.

The steps are one generated function (see `live.run.generated_source`). If user code adds or removes a hook,
or leaves a mode switched, the remaining steps change. They become another plan, which runs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from retrograd.backends.background import pending, take_finished
from retrograd.backends.base import Backend
from retrograd.backends.registry import EagerBackend
from retrograd.config import Config
from retrograd.engine import Collected, HookChanges, LiveBackward, States, states_of, watching
from retrograd.errors import Reason, nearest
from retrograd.events import counters
from retrograd.graph.backward_graph import (
    BackwardGraph,
    CallKind,
    OpaqueCall,
    Schedule,
    Segment,
    SourceKind,
    call_name,
    source_of,
)
from retrograd.live.capture.segments import changing_numbers, cut
from retrograd.live.plan_log import PlanLog
from retrograd.live.run.fused_segments import fused
from retrograd.live.run.generated_source import GeneratedSource, PlanLayout
from retrograd.live.run.mid_backward_hooks import rest_with_changes
from retrograd.live.run.segment_runner import SegmentRunner, runner_of
from retrograd.process import cached_property
from retrograd.repeats.divide import regions_of
from retrograd.report import BackwardReport
from retrograd.runtime.modes import KeptModes, UserCode
from retrograd.runtime.profiler import profiling

#: A segment that is not a copy of a region is compiled later if some region has at least this many copies,
#: and the segment makes up at most one n-th of the backward, where n is this number.
REGION_RULES = 6

#: how often such a segment is interpreted first
RUNS_OF_THE_REST = 4

_RARE = "too small to compile in the first few runs"

_NONE: Mapping[str, str] = MappingProxyType({})

#: for plans without user code: only user code can change hooks
_NO_CHANGES = nullcontext(HookChanges())


@dataclass(frozen=True)
class Rest:
    """What the rest of a backward needs to know about its beginning.

    Attributes:
        states: the states that saved tensors had when the backward began.
        leaked: modes that user code left switched, and the index of the node call that they affect. Eager
            restores the thread's modes between nodes, but not between the hooks of a node and the node
            itself. So after a pre hook that leaves grad mode on, the gradients of its node have a history.
    """

    states: States
    leaked: tuple[int, KeptModes] | None


class Plan:
    """The steps of one backward, with the code of its segments.

    Args:
        graph: the calls.
        config: the settings.
        backend: lowers the segments.
        raised: calls that could not be traced, by name, with their errors.
        rest: for the rest of a backward; None for a whole one.

    Attributes:
        schedule: the steps.
        report: the report of this plan.
        log: writes into the report.
        runs_user_code: whether a step calls something that can inspect the running backward.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        config: Config,
        backend: Backend,
        raised: Mapping[str, str] = _NONE,
        rest: Rest | None = None,
    ) -> None:
        counters["plans"] += 1
        self._graph, self._raised = graph, raised
        self._leaked = None if rest is None else rest.leaked
        self.schedule = _schedule(graph, config, backend, raised, self._leaked)
        self._opaque_calls = len(self.schedule.opaque_calls)
        self.runs_user_code = self._opaque_calls > 0
        self.report = BackwardReport(graph, self.schedule, backend.name)
        self.log = PlanLog(self.report)
        for reason in _unmatched(graph, config.opaque):
            self.log.recorded(reason)
        # If no user code runs between segments, all of them are recorded together.
        is_fused = config.cudagraphs and not self.runs_user_code
        own = replace(config, cudagraphs=False) if is_fused else config
        segments = [(i, step) for i, step in enumerate(self.schedule.steps) if isinstance(step, Segment)]
        self._runners = {
            step: runner_of(segment, number, own, backend, self.log)
            for number, (step, segment) in enumerate(segments)
        }
        self._compiled = {step: one for step, one in self._runners.items() if not one.is_interpreted}
        _postpone_the_rest(self.schedule, [*self._runners.values()])
        self._layout = PlanLayout(
            self.schedule,
            tuple(graph.placeholders()),
            graph.outputs(),
            frozenset(rest.states) if rest else _saved_tensors(graph),
            {step: one.run for step, one in self._compiled.items()},
            None if rest is None else rest.states,
            self._leaked,
        )
        layout = fused(self._layout, [*self._compiled.values()], self.log) if is_fused else None
        self._source = GeneratedSource(layout or self._layout)

    @property
    def is_outdated(self) -> bool:
        """Whether segments are interpreted because they contain calls that could not be traced. A new plan
        that knows these calls puts them into separate segments, and compiles the rest."""
        return any(one.shared.raised_in not in (None, *self._raised) for one in self._compiled.values())

    def raised(self) -> dict[str, str]:
        """The calls that could not be traced, by name, with their errors."""
        shared = [one.shared for one in self._compiled.values()]
        new = {one.raised_in: one.interpret_because or "" for one in shared if one.raised_in is not None}
        return {**self._raised, **new}

    def given_up(self) -> list[Reason]:
        """Why segments that were to be compiled are interpreted from now on."""
        found = (runner.lowerer.given_up for runner in self._compiled.values())
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    def code(self) -> str:
        """The generated function as text."""
        return "\n".join(self._source.emit.lines)

    def postpone(self, because: str) -> None:
        """In the next run, interpret the segments that are not compiled yet."""
        for runner in self._compiled.values():
            runner.postpone(because)

    def run(self, call: Collected, backward: LiveBackward) -> list[torch.Tensor | None]:
        """Run all steps."""
        if pending:
            take_finished()
        self.report.runs += 1
        counters["runs"] += 1
        with watching(backward) if self.runs_user_code else _NO_CHANGES as changes:
            return self._run(call, backward, changes)

    def _run(self, call: Collected, backward: LiveBackward, changes: HookChanges) -> list[Any]:
        user = UserCode() if self.runs_user_code else None
        source = self._profiled if profiling() else self._source
        result = source.function(call, backward, changes, user)
        if type(result) is list:
            counters["opaque_calls"] += self._opaque_calls
            return result
        if result is None:
            self._watch_less(call)
            return self._run(call, backward, changes)
        number, variables = result
        del result
        done = self.schedule.steps[:number]
        counters["opaque_calls"] += sum(isinstance(step, OpaqueCall) for step in done)
        values, states = source.found_in(variables)
        variables.clear()
        leaked = (backward.node_call, user.left) if user and user.left else self._leaked
        # Plan the remaining steps again.
        graph, rest = rest_with_changes(self._graph, done, values, backward, changes)
        new = dict(zip(values, rest, strict=False))
        states = {new[node]: state for node, state in states.items() if node in new}
        plan = Plan(graph, Config(backend="eager"), EagerBackend(), rest=Rest(states, leaked))
        remaining = Collected(None, [*rest.values()], [], [], [], [])
        values.clear()
        rest.clear()
        return plan._run(remaining, backward, changes)

    def _watch_less(self, call: Collected) -> None:
        """From now on, do not watch saved tensors that have no version counter, such as inference tensors."""
        sources = {node: source.index for node, source in self._layout.placeholders}
        saved = [node for node in self._layout.saved if states_of([call.inputs[sources[node]]]) != [None]]
        self._layout = replace(self._layout, saved=frozenset(saved))
        self._source = GeneratedSource(self._layout)
        self.__dict__.pop("_profiled", None)

    @cached_property
    def _profiled(self) -> GeneratedSource:
        """The generated function with a profiler range around each step."""
        runs = {step: runner.run for step, runner in self._runners.items()}
        return GeneratedSource(replace(self._layout, runs=runs, log=self.log))


def _schedule(
    graph: BackwardGraph,
    config: Config,
    backend: Backend,
    raised: Mapping[str, str],
    leaked: tuple[int, KeptModes] | None,
) -> Schedule:
    named = _calls_named(graph, dict.fromkeys(config.opaque, "named in opaque="))
    if not backend.traces:
        here = (pair for pair in graph.calls() if leaked and pair[1].node_call == leaked[0])
        switched = {node: "in modes that user code left" for node, call in here if call.kind.is_functional}
        return cut(graph, switched | named, at_once=True)
    smallest = config.smallest_repeat
    divide = partial(regions_of, smallest=smallest, copies=config.fewest_copies) if smallest else None
    return cut(graph, changing_numbers(graph) | _calls_named(graph, raised) | named, divide)


def _calls_named(graph: BackwardGraph, reasons: Mapping[str, str]) -> dict[fx.Node, str]:
    """The functional calls whose names are in `reasons`, with the reason."""
    if not reasons:
        return {}
    names = {node: call_name(node) for node, call in graph.calls() if call.kind.is_functional}
    return {node: reasons[name] for node, name in names.items() if name in reasons}


def _unmatched(graph: BackwardGraph, names: Iterable[str]) -> Iterator[Reason]:
    """A note for each name in ``opaque=`` that no functional call of this backward has."""
    known = {call_name(node) for node, call in graph.calls() if call.kind.is_functional} if names else set()
    for name in sorted({*names} - known):
        text = f"no node is called {name!r} (opaque=){nearest(name, known)}"
        yield Reason("opaque-unmatched", text, "live.schedule")


def _postpone_the_rest(schedule: Schedule, runners: Sequence[SegmentRunner]) -> None:
    """If copies of one region make up most of a backward, postpone each small segment that occurs only once:
    compiling it takes as long as compiling the region, and gains little."""
    shared = [id(runner.shared) for runner in runners]
    copies = Counter(shared)
    if max(copies.values(), default=0) < REGION_RULES:
        return
    total = sum(len(segment.nodes) for segment in schedule.segments)
    for segment, runner, key in zip(schedule.segments, runners, shared, strict=True):
        if copies[key] == 1 and len(segment.nodes) * REGION_RULES <= total:
            runner.postpone(_RARE, RUNS_OF_THE_REST)


def _saved_tensors(backward: BackwardGraph) -> frozenset[fx.Node]:
    """Placeholders that nodes read as saved tensors, not as incoming gradients, nor to write `.grad`."""
    reads = {CallKind.NODE, CallKind.ATEN, CallKind.CPP_FUNCTION, CallKind.FUNCTION}
    return frozenset(
        value
        for node, call in backward.calls()
        if call.kind in reads
        for value in node.all_input_nodes
        if value.op == "placeholder" and source_of(value).kind is SourceKind.INPUT
    )
