"""Lower segments at first use, and again when their guards fail.

In: a `Segment` and the values that arrive at it. Out: its outputs, computed by the backend's code or, where
that is not possible, by interpreting the captured calls, with a reason either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.boxed import boxed, copied
from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd._torch.locks import ForkSafeLock
from retrograd._torch.thread_state import modes_of_lowering
from retrograd._torch.tracing import NotTraceableError, trace, why_not_traceable
from retrograd.backends.base import Backend, Boxed
from retrograd.config import Config
from retrograd.errors import LoweringError, Reason
from retrograd.events import counters, live_log
from retrograd.graph.report import LoweringReport
from retrograd.graph.schedule import Segment

__all__ = ["SegmentRunner"]

Symbolic = dict[int, frozenset[int]]

#: tracing patches torch globally while it runs: one thread at a time.
_one_at_a_time = ForkSafeLock()


@dataclass(frozen=True)
class _Lowered:
    guard: InputGuard
    modes: tuple[object, ...]
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph

    def __call__(self, args: list[Any]) -> list[Any]:
        inputs = [args[i] for i in self.fed]
        args.clear()
        results = self.run(inputs)
        return [None if place is None else results[place] for place in self.given]


class SegmentRunner:
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
        self._segment, self._number = segment, number
        self._config, self._backend, self._report = config, backend, report
        self._run_as_captured = boxed(_segment_graph(segment))
        self._lowered: list[_Lowered] = []
        self._symbolic: Symbolic = {}
        self._interpret_because = self._why_interpreted()

    def _why_interpreted(self) -> str | None:
        if not self._backend.traces:
            return f"backend {self._backend.name} interprets"
        return None if self._segment.worth_compiling else "nothing in it is worth compiling"

    def run(self, args: list[Any]) -> Sequence[Any]:
        """The segment's outputs; `args` is emptied."""
        if self._interpret_because is not None or torch.is_grad_enabled():
            return self._interpret(args)
        modes = modes_of_lowering()
        for lowered in self._lowered:
            if lowered.modes == modes and lowered.guard.check(args):
                return lowered(args)
        fresh = self._lower(args)
        return self._interpret(args) if fresh is None else fresh(args)

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        return self._run_as_captured(args)

    def _lower(self, args: Sequence[Any]) -> _Lowered | None:
        """A new lowering for these values; None if the segment is to be interpreted this time."""
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
        return _Lowered(guard, modes_of_lowering(), run, traced.fed, traced.given, graph)

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
            node=", ".join(_names(self._segment)[:3]),
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
        live_log.debug("segment %d: %s, %s", self._number, how, because)
        self._report(LoweringReport(self._number, how, guards, because, graph, recompile))


def _names(segment: Segment) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in segment.nodes]


def _segment_graph(segment: Segment) -> fx.Graph:
    """The segment as a graph of its own: its inputs in, a tuple of its outputs out."""
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in segment.inputs}
    for node in segment.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in segment.outputs))
    return graph
