"""Lower segments at first use, and again when their guards fail.

In: a `Segment` and the values that arrive at it. Out: its outputs, computed by the backend's code or, where
that is not possible, by interpreting the captured calls, with a reason either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd._torch.boxed import boxed, copied
from retrograd._torch.guards import InputGuard, changed_sizes
from retrograd._torch.subclasses import SubclassBorder, SymbolicMetadataError, is_wrapper
from retrograd._torch.thread_state import modes_of_lowering, without_torch_functions
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
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class _Lowered:
    guard: InputGuard
    modes: tuple[object, ...]
    run: Boxed
    fed: tuple[int, ...]
    given: tuple[int | None, ...]
    graph: fx.Graph
    border: SubclassBorder | None

    def guards(self) -> str:
        """What must hold, for the report."""
        return str(self.guard) if self.border is None else f"{self.border}; {self.guard}"

    def flat(self, args: list[Any]) -> list[Any] | None:
        """The values that its code takes, if `args` fit; None if they do not."""
        flat = args if self.border is None else self.border.enter(args)
        return flat if flat is not None and self.guard.check(flat) else None

    def __call__(self, args: list[Any], flat: list[Any]) -> list[Any]:
        """The outputs; both lists are emptied."""
        passed = {} if self.border is None else self.border.passed_through(args)
        inputs = [flat[i] for i in self.fed]
        args.clear()
        flat.clear()
        results = self.run(inputs)
        outputs = [None if place is None else results[place] for place in self.given]
        return outputs if self.border is None else self.border.exit(outputs, passed)


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
        outputs = self._compiled(args)
        return self._interpret(args) if outputs is None else outputs

    @without_torch_functions
    def _compiled(self, args: list[Any]) -> Sequence[Any] | None:
        """The outputs, by code that fits or is made now; None if the segment is to be interpreted."""
        modes = modes_of_lowering()
        for lowered in self._lowered:
            if lowered.modes == modes and (flat := lowered.flat(args)) is not None:
                return lowered(args, flat)
        fresh = self._lower(args)
        return None if fresh is None else fresh[0](args, fresh[1])

    def _interpret(self, args: list[Any]) -> Sequence[Any]:
        return self._run_as_captured(args)

    def _lower(self, args: list[Any]) -> tuple[_Lowered, list[Any]] | None:
        """A new lowering for these values, and what its code takes; None if the segment is to be interpreted
        this time."""
        if reason := next(filter(None, map(why_not_traceable, args)), None):
            self._give_up(reason)
            return None
        try:
            border, flat = _border(args)
            because = self._note_changes(args, flat, border)
            if len(self._lowered) >= self._config.recompile_limit:
                self._reach_limit(because)
                return None
            with _one_at_a_time:
                lowered = self._compile(flat, border)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0], error)
            return None
        recompile = bool(self._lowered)
        self._lowered.insert(0, lowered)
        counters["lowerings"] += 1
        counters["recompiles"] += recompile
        self._tell(self._backend.name, lowered.guards(), because, lowered.graph, recompile)
        return lowered, flat

    def _reach_limit(self, because: str) -> None:
        self._interpret_because = f"recompile limit of {self._config.recompile_limit} reached: {because}"
        self._tell("interpreted", "", self._interpret_because)

    def _compile(self, args: Sequence[Any], border: SubclassBorder | None) -> _Lowered:
        run_flat = self._run_as_captured if border is None else border.flattened(self._run_as_captured)
        decompositions = self._backend.decompositions()
        try:
            traced = trace(run_flat, args, self._symbolic or None, decompositions)
        except SymbolicMetadataError:
            traced = trace(run_flat, args, None, decompositions)
        graph = copied(traced.gm.graph)  # a backend may rewrite the one that it is given
        run = self._backend.compile(traced.gm, traced.example_inputs)
        guard = InputGuard(args, traced.fed, traced.example_inputs, traced.shape_env)
        return _Lowered(guard, modes_of_lowering(), run, traced.fed, traced.given, graph, border)

    def _note_changes(self, args: list[Any], flat: list[Any], border: SubclassBorder | None) -> str:
        """Sizes that differ from the last lowering become symbolic; says what failed."""
        last = self._lowered[0] if self._lowered else None
        if last is None or not _is_alike(last.border, args):
            self._symbolic = self._initially_symbolic(flat, border.numbers if border else frozenset())
            return "first use" if last is None else f"another class or metadata: {last.border} / {border}"
        if last.modes != modes_of_lowering():
            return f"modes were {last.modes}, now {modes_of_lowering()}"
        if self._config.dynamic is not False:
            for index, dims in changed_sizes(last.guard.args_metadata, flat).items():
                self._symbolic[index] = self._symbolic.get(index, frozenset()) | dims
        return last.guard.why_not(flat)

    def _initially_symbolic(self, args: Sequence[Any], outer: frozenset[int]) -> Symbolic:
        """Sizes that reach the segment as numbers are those that the engine saw change: they are symbolic
        from the start, and so are dimensions of the same extent (`outer`: those of subclass tensors)."""
        if self._config.dynamic is False:
            return {}
        moving = {value for i, value in enumerate(args) if type(value) is int and i not in outer}
        symbolic: Symbolic = {}
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                dims = [d for d, s in enumerate(value.shape) if self._config.dynamic or s in moving]
                symbolic[i] = frozenset(dims)
            elif type(value) is int and (i not in outer or self._config.dynamic or value in moving):
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


def _border(args: list[Any]) -> tuple[SubclassBorder | None, list[Any]]:
    """The border of these values, if there is a subclass among them, and the flat values behind it."""
    if not any(map(is_wrapper, args)):
        return None, args
    border = SubclassBorder(args)
    flat = border.enter(args)
    assert flat is not None
    return border, flat


def _is_alike(border: SubclassBorder | None, args: list[Any]) -> bool:
    """Whether the values have the classes and metadata of those that `border` was made for."""
    return not any(map(is_wrapper, args)) if border is None else border.enter(args) is not None


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
