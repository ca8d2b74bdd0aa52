"""Cut a backward in eager's order into segments, opaque calls and accumulations.

In: a `BackwardGraph` in eager's order, and which built-in nodes must stay opaque. Out: a `Schedule`.

An accumulation into ``.grad`` is visible to few until the next opaque call, so it does not end a segment
that is compiled: it waits for the next opaque call, the end, or the end of the region that makes its
gradient. That keeps a backward without hooks in one segment, unless what repeats itself in it is to be
compiled once. Segments that are interpreted end with each accumulation, as eager has it: a gradient that was
added is let go, a failure later on finds it written, and what shares memory with a ``.grad`` is read after it
was changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from retrograd.graph.backward_graph import (
    Accumulation,
    BackwardGraph,
    CallKind,
    OpaqueCall,
    PlanStep,
    Schedule,
    Segment,
    call_of,
)

_WORTH_COMPILING = frozenset({CallKind.NODE, CallKind.ATEN, CallKind.COPY_SLICES})


Divide = Callable[[Sequence[fx.Node]], Sequence[Sequence[fx.Node]]]


def whole(run: Sequence[fx.Node]) -> Sequence[Sequence[fx.Node]]:
    """`run` in one piece."""
    return [run]


def cut(
    backward: BackwardGraph,
    opaque: Mapping[fx.Node, str],
    apart: Mapping[fx.Node, str] | None = None,
    divide: Divide = whole,
    at_once: bool = False,
) -> Schedule:
    """Cut `backward` into steps.

    Args:
        backward: in eager's order.
        opaque: functional calls that are nevertheless to run as eager runs them, with the reason.
        apart: functional calls that are to be segments of their own, interpreted, with the reason.
        divide: divides a run of functional calls into the segments that it is to become.
        at_once: whether each accumulation ends a segment.
    """
    apart = apart or {}
    runs = _Cutter(opaque, apart, divide, at_once).run(backward)
    last_use = _last_uses(runs, backward.outputs())
    steps = tuple(
        _segment(step, number, last_use, apart) if isinstance(step, list) else step
        for number, step in enumerate(runs)
    )
    dying: list[set[fx.Node]] = [set() for _ in steps]
    for node, number in last_use.items():
        if number < len(steps):
            dying[number].add(node)
    return Schedule(steps, tuple(map(frozenset, dying)))


_Run = list[fx.Node] | OpaqueCall | Accumulation


class _Cutter:
    """Splits the calls into runs of functional ones and everything else."""

    def __init__(
        self, opaque: Mapping[fx.Node, str], apart: Mapping[fx.Node, str], divide: Divide, at_once: bool
    ) -> None:
        self._opaque, self._apart, self._divide, self._at_once = opaque, apart, divide, at_once
        self._runs: list[_Run] = []
        self._current: list[fx.Node] = []
        self._accumulations: list[Accumulation] = []

    def run(self, backward: BackwardGraph) -> list[_Run]:
        projected: set[fx.Node] = set()
        for node, call in backward.calls():
            if node in projected:
                continue
            if call.kind is CallKind.ACCUMULATE:
                self._accumulations.append(Accumulation(node))
                if self._at_once:
                    self._flush()
            elif node in self._apart:
                self._flush()
                self._runs.append([node])
            elif call.kind.is_functional and node not in self._opaque:
                self._current.append(node)
            else:
                self._flush()
                step = OpaqueCall(node, _projections(node), self._opaque.get(node) or _why_opaque(node))
                projected.update(step.projections)
                self._runs.append(step)
        self._flush()
        return self._runs

    def _flush(self) -> None:
        """The pieces of the current run, each followed by the accumulations whose gradients are there."""
        pieces = self._divide(self._current) if self._current else []
        made_in = {node: i for i, piece in enumerate(pieces) for node in piece} if len(pieces) > 1 else {}
        waiting = deque(self._accumulations)
        for i, piece in enumerate(pieces[:-1]):
            self._runs.append(list(piece))
            while waiting and all(made_in.get(arg, 0) <= i for arg in waiting[0].node.all_input_nodes):
                self._runs.append(waiting.popleft())
        self._runs += map(list, pieces[-1:])
        self._runs += waiting
        self._current, self._accumulations = [], []


def _projections(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(user for user in node.users if call_of_or_none(user) is CallKind.PROJECT)


def call_of_or_none(node: fx.Node) -> CallKind | None:
    """The kind of a call node; None for the output node."""
    return call_of(node).kind if node.op == "call_function" else None


def _why_opaque(node: fx.Node) -> str:
    call = call_of(node)
    return call.note or (call.hook or call.kind).value


def _last_uses(runs: Iterable[_Run], outputs: Iterable[fx.Node | None]) -> dict[fx.Node, int]:
    """For each value, the number of the last step that reads it; outputs outlive all steps."""
    last: dict[fx.Node, int] = {}
    number = -1
    for number, run in enumerate(runs):
        for node in run if isinstance(run, list) else [run.node]:
            last[node] = number
            last.update(dict.fromkeys(node.all_input_nodes, number))
        if isinstance(run, OpaqueCall):
            last.update(dict.fromkeys(run.projections, number))
    last.update({node: number + 1 for node in outputs if node is not None})
    return last


def _segment(
    nodes: list[fx.Node], number: int, last_use: Mapping[fx.Node, int], apart: Mapping[fx.Node, str]
) -> PlanStep:
    own = set(nodes)
    inputs = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in own)
    outputs = tuple(node for node in nodes if last_use[node] > number)
    worth = any(call_of(node).kind in _WORTH_COMPILING for node in nodes)
    return Segment(tuple(nodes), tuple(inputs), outputs, worth, apart.get(nodes[0], ""))
