"""Cuts a backward in eager's order into segments, opaque calls and accumulations.

In: a `BackwardGraph` in eager's order, and which functional calls must stay opaque. Out: a `Schedule`. A call
whose numbers differ between captures is opaque, so that all segments stay equal. So after two captures, a
third value of such a number compiles nothing.

Hardly anything can observe an accumulation into ``.grad`` before the next opaque call, so it does not end a
compiled segment. We delay it until the next opaque call, the end, or the end of the region that computes its
gradient. So a backward without hooks is one segment, unless a region repeats in it and is to be compiled
once. Then each copy of the region (the layers of a deep model) is a segment, and so is the code before,
between and after the copies. An interpreted segment ends at each accumulation, as in eager: the gradient is
freed after it was added, a later failure finds it written, and a value that shares memory with a ``.grad`` is
read after the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from retrograd.graph.backward_graph import (
    Accumulation,
    BackwardGraph,
    CallKind,
    OpaqueCall,
    Schedule,
    Segment,
    call_name,
    call_of,
    dying_values,
    returns_view,
)
from retrograd.graph.structure import structure_and_numbers
from retrograd.process import Recent

_WORTH_COMPILING = frozenset({CallKind.NODE, CallKind.ATEN, CallKind.COPY_SLICES})

Divide = Callable[[Sequence[fx.Node]], Sequence[Sequence[fx.Node]]]


def cut(
    backward: BackwardGraph,
    opaque: Mapping[fx.Node, str],
    divide: Divide | None = None,
    at_once: bool = False,
) -> Schedule:
    """Cut `backward` into steps.

    Args:
        backward: in eager's order.
        opaque: functional calls that must run as in eager, with the reason.
        divide: divides a run of functional calls into segments. Without it, each run is one segment.
        at_once: whether each accumulation ends a segment.
    """
    runs = _Cutter(opaque, divide, at_once).run(backward)
    dying = dying_values([_values_of(run) for run in runs], backward.outputs())
    steps = tuple(
        _segment(run, gone) if isinstance(run, list) else run for run, gone in zip(runs, dying, strict=True)
    )
    return Schedule(steps, dying)


_Run = list[fx.Node] | OpaqueCall | Accumulation


class _Cutter:
    """Groups consecutive functional calls into runs, and separates them from all other calls."""

    def __init__(self, opaque: Mapping[fx.Node, str], divide: Divide | None, at_once: bool) -> None:
        self._opaque, self._divide, self._at_once = opaque, divide, at_once
        self._runs: list[_Run] = []
        self._current: list[fx.Node] = []
        self._accumulations: list[Accumulation] = []

    def run(self, backward: BackwardGraph) -> list[_Run]:
        done: set[fx.Node] = set()
        for node, call in backward.calls():
            if node in done:
                continue
            if call.kind is CallKind.ACCUMULATE:
                self._accumulations.append(Accumulation(node))
                if self._at_once:
                    self._flush()
            elif call.kind.is_functional and node not in self._opaque:
                self._current.append(node)
            else:
                self._flush()
                users = (user for user in node.users if user.op == "call_function")
                projections = tuple(user for user in users if call_of(user).kind is CallKind.PROJECT)
                why = self._opaque.get(node) or call.note or (call.hook or call.kind).value
                done.update(projections)
                self._runs.append(OpaqueCall(node, projections, why))
        self._flush()
        return self._runs

    def _flush(self) -> None:
        """Emit the pieces of the current run. Each is followed by the accumulations whose gradients are
        computed."""
        pieces: Sequence[Sequence[fx.Node]] = [self._current] if self._current else []
        if self._divide is not None and _is_worth_compiling(self._current):
            pieces = self._divide(self._current)
        made_in = {node: i for i, piece in enumerate(pieces) for node in piece} if len(pieces) > 1 else {}
        waiting = deque(self._accumulations)
        for i, piece in enumerate(pieces[:-1]):
            self._runs.append(list(piece))
            while waiting and all(made_in.get(arg, 0) <= i for arg in waiting[0].node.all_input_nodes):
                self._runs.append(waiting.popleft())
        self._runs += map(list, pieces[-1:])
        self._runs += waiting
        self._current, self._accumulations = [], []


def _values_of(run: _Run) -> Iterator[fx.Node]:
    """The values that a step reads and computes."""
    for node in run if isinstance(run, list) else [run.node]:
        yield node
        yield from node.all_input_nodes
    if isinstance(run, OpaqueCall):
        yield from run.projections


def _segment(nodes: list[fx.Node], dying: frozenset[fx.Node]) -> Segment:
    own = set(nodes)
    inputs = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in own)
    outputs = tuple(node for node in nodes if node not in dying)
    return Segment(tuple(nodes), tuple(inputs), outputs, _is_worth_compiling(nodes))


def _is_worth_compiling(nodes: Sequence[fx.Node]) -> bool:
    return any(call_of(node).kind in _WORTH_COMPILING and not returns_view(node) for node in nodes)


# numbers that change from capture to capture


class _Numbers:
    """The numbers in the calls of one structure: their last values, and the calls whose numbers have
    changed."""

    def __init__(self) -> None:
        self.last: tuple[tuple[str, ...], ...] | None = None
        self.changing: dict[int, str] = {}

    def see(self, names: list[str], now: tuple[tuple[str, ...], ...]) -> None:
        """Compare with the last capture."""
        for i, (old, new) in enumerate(zip(self.last or now, now, strict=True)):
            if old != new:
                self.changing.setdefault(i, f"{names[i]} had {', '.join(old)}, now {', '.join(new)}")
        self.last = now


#: by structure, numbers excluded
_numbers: Recent[_Numbers] = Recent()


def changing_numbers(backward: BackwardGraph) -> dict[fx.Node, str]:
    """The calls whose numbers differ between captures, with the first two values that differed.

    Only calls of nodes count: the arguments of a hook or a Function do not reach a segment.
    """
    structure, numbers = structure_and_numbers(backward)
    if structure is None or not any(numbers.values()):
        return {}
    nodes = list(numbers)
    known, _ = _numbers.get(structure, _Numbers)
    known.see([*map(call_name, nodes)], tuple(numbers.values()))
    functional = {node for node, call in backward.calls() if call.kind is CallKind.NODE}
    return {nodes[i]: text for i, text in known.changing.items() if nodes[i] in functional}
