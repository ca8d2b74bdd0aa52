"""Lower segments at first use, and again when their guards fail.

In: a `Segment` and the values that arrive at it. Out: its outputs, computed by the backend's code or, where
that is not possible, by interpreting the captured calls, with a reason either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from retrograd._torch.boxed import boxed, copied
from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd._torch.thread_state import modes_of_lowering, why_interpreted_now
from retrograd._torch.tracing import NotTraceableError, is_batched, trace, why_not_traceable
from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.errors import LoweringError, Reason
from retrograd.events import counters, live_log
from retrograd.graph.report import LoweringReport
from retrograd.graph.schedule import Segment
from retrograd.live.differentiable import Differentiable
from retrograd.live.sharing import runners
from retrograd.live.structure import structure_of

__all__ = ["BoxedRunner", "SegmentRunner", "runner_of"]

Symbolic = dict[int, frozenset[int]]

#: tracing patches torch globally while it runs: one thread at a time.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class _Lowered:
    guard: InputGuard
    modes: tuple[object, ...]
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph
    differentiable: Differentiable | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        if self.differentiable is None:
            return self._outputs(args)
        values = list(args)
        with torch.no_grad():
            results = self._outputs(args)
        return self.differentiable(results, values)

    def _outputs(self, args: list[Any]) -> list[Any]:
        inputs = [args[i] for i in self.fed]
        args.clear()
        results = self.run(inputs)
        return [None if place is None else results[place] for place in self.given]


@dataclass(frozen=True)
class How:
    """How a function is lowered, and what to call it.

    Attributes:
        number: place of the segment that it belongs to among the segments of its schedule.
        names: the autograd nodes in it.
        config, backend: how to lower it.
        report: is told every lowering.
        role: what it is to the segment; empty for the segment itself.
    """

    number: int
    names: tuple[str, ...]
    config: Config
    backend: Backend
    report: Callable[[LoweringReport], None]
    role: str = ""


class BoxedRunner:
    """Runs one boxed function: lowers it at first use, and again when guards fail.

    Args:
        fn: the function as captured.
        how: how to lower it.
        interpret_because: why it is never lowered; None if it may be.
    """

    def __init__(self, fn: Boxed, how: How, interpret_because: str | None = None) -> None:
        self._run_as_captured, self._how = fn, how
        self._number, self._config = how.number, how.config
        self._backend, self._report = how.backend, how.report
        self._lowered: list[_Lowered] = []
        self._symbolic: Symbolic = {}
        self._interpret_because = interpret_because
        self._told: set[str] = set()
        self._postponed: str | None = None

    def postpone(self, because: str) -> None:
        """Interpret the next run, if nothing is compiled yet."""
        if not self._lowered:
            self._postponed = because

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The function's outputs; `args` is emptied."""
        if self._interpret_because is not None:
            return self._interpret(args)
        now, self._postponed = self._postponed or why_interpreted_now(args), None
        if now is not None:
            return self._interpret_now(args, now)
        modes = modes_of_lowering()
        for lowered in self._lowered:
            if lowered.modes == modes and lowered.guard.check(args):
                return lowered(args)
        fresh = self._lower(args)
        return self._interpret(args) if fresh is None else fresh(args)

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        return self._run_as_captured(args)

    def _interpret_now(self, args: list[Any], because: str) -> Sequence[Any]:
        if because not in self._told:
            self._told.add(because)
            self._tell("interpreted", "", because)
        return self._interpret(args)

    def _lower(self, args: Sequence[Any]) -> _Lowered | None:
        """A new lowering for these values; None if the segment is to be interpreted this time."""
        if any(map(is_batched, args)):
            return None  # by the engine, for one backward with is_grads_batched
        if reason := next(filter(None, map(why_not_traceable, args)), None):
            self._give_up(reason)
            return None
        because = self._note_changes(args)
        if len(self._lowered) >= self._config.recompile_limit:
            self._interpret_because = f"recompile limit of {self._config.recompile_limit} reached: {because}"
            self._tell("interpreted", "", self._interpret_because)
            return None
        try:
            with _one_at_a_time:
                lowered = self._compile(args)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0], error)
            return None
        recompile = bool(self._lowered)
        self._lowered.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        self._tell(self._backend.name, str(lowered.guard), because, lowered.graph, recompile)
        return lowered

    def _compile(self, args: Sequence[Any]) -> _Lowered:
        traced = trace(self._run_as_captured, args, self._symbolic or None, self._backend.decompositions())
        graph = copied(traced.gm.graph)  # a backend may rewrite the one that it is given
        run = self._backend.compile(traced.gm, traced.example_inputs)
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        lowered = _Lowered(guard, modes_of_lowering(), run, traced.fed, traced.given, graph)
        if traced.history is None:
            return lowered
        recorded = Differentiable(self._run_as_captured, args, traced.history, self._another)
        return replace(lowered, differentiable=recorded)

    def _another(self, fn: Boxed, role: str) -> BoxedRunner:
        """A runner for a derivative of this function."""
        role = f"{role} of its {self._how.role}" if self._how.role else role
        return BoxedRunner(fn, replace(self._how, role=role))

    def _note_changes(self, args: Sequence[Any]) -> str:
        """Sizes that differ from the last lowering become symbolic; says what failed."""
        if not self._lowered:
            self._symbolic = self._initially_symbolic(args)
            return "first use"
        if self._lowered[0].modes != modes_of_lowering():
            return f"modes were {self._lowered[0].modes}, now {modes_of_lowering()}"
        last = self._lowered[0].guard
        if self._config.dynamic is not False:
            for index, dims in changed_sizes(last.args_metadata, args).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.why_not(args)

    def _initially_symbolic(self, args: Sequence[Any]) -> Symbolic:
        """Sizes that reach the segment as numbers are those that the engine saw change: they are symbolic
        from the start, and so are the tensors' dimensions of the same extent."""
        if self._config.dynamic is False:
            return {}
        moving = {value for value in args if type(value) is int}
        symbolic: Symbolic = {}
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                dims = [d for d, s in enumerate(value.shape) if self._config.dynamic or s in moving]
                symbolic[i] = frozenset(dims)
            elif type(value) is int:
                symbolic[i] = frozenset({0})
        return {i: dims for i, dims in symbolic.items() if dims}

    def _give_up(self, text: str, error: Exception | None = None) -> None:
        """This segment cannot be compiled: interpret it from now on, or raise in strict mode."""
        reason = Reason(
            code="segment-not-compiled",
            text=f"segment {self._number} is interpreted: {text}",
            stage="live.lower",
            node=", ".join(self._how.names[:3]),
            way_out="name the node in opaque=, or leave it: only this segment runs uncompiled",
        )
        if self._config.strict:
            raise LoweringError(reason) from error
        if error is not None and not isinstance(error, NotTraceableError):
            live_log.info("%s", reason, exc_info=error)
        self._interpret_because = text
        self._tell("interpreted", "", text)

    def _tell(
        self, how: str, guards: str, because: str, graph: fx.Graph | None = None, recompile: bool = False
    ) -> None:
        because = f"{self._how.role}: {because}" if self._how.role else because
        live_log.debug("segment %d: %s, %s", self._number, how, because)
        self._report(LoweringReport(self._number, how, guards, because, graph, recompile))


class SegmentRunner(BoxedRunner):
    """Runs one segment.

    Args:
        segment: the segment, and `number` its place among the segments of its schedule.
        config, backend: how to lower it.
        report: is told every lowering.
    """

    def __init__(
        self,
        segment: Segment,
        number: int,
        config: Config,
        backend: Backend,
        report: Callable[[LoweringReport], None],
    ) -> None:
        how = How(number, _names(segment), config, backend, report)
        super().__init__(boxed(_segment_graph(segment)), how, _why_interpreted(segment, backend))


def runner_of(
    segment: Segment,
    number: int,
    config: Config,
    backend: Backend,
    report: Callable[[LoweringReport], None],
) -> SegmentRunner:
    """A runner for the segment: that of an equal segment in the same place of an earlier plan, if there was
    one. The arguments are those of `SegmentRunner`."""

    def make() -> SegmentRunner:
        return SegmentRunner(segment, number, config, backend, report)

    structure = structure_of(segment.nodes, segment.inputs, segment.outputs)
    if structure is None or _why_interpreted(segment, backend) is not None:
        return make()
    runner, is_new = runners.get((config, number, structure), make)
    assert isinstance(runner, SegmentRunner)
    if not is_new:
        report(LoweringReport(number, backend.name, "", "shared with an earlier backward's equal segment"))
    return runner


def _why_interpreted(segment: Segment, backend: Backend) -> str | None:
    if not backend.traces:
        return f"backend {backend.name} interprets"
    if segment.interpret_because:
        return segment.interpret_because
    return None if segment.worth_compiling else "nothing in it is worth compiling"


def _names(segment: Segment) -> tuple[str, ...]:
    return tuple(getattr(node.target, "__name__", str(node.target)) for node in segment.nodes)


def _segment_graph(segment: Segment) -> fx.Graph:
    """The segment as a graph of its own: its inputs in, a tuple of its outputs out."""
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in segment.inputs}
    for node in segment.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in segment.outputs))
    return graph
