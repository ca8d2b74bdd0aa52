"""Numbers in which equal calls differ: layers share their code, and what changes all the time is not
compiled.

In: traced segments that differ only in floating point numbers. Out: one ATen graph in which numbers that
differ are inputs, and the numbers of each segment. A number is lifted only where a tensor in its place
computes the same to the bit: as the second operand of a sum, difference or product of a tensor of the same
floating point dtype that is not a scalar itself. Segments that differ in anything else keep their own code.

In: a backward that was captured before with other numbers. Out: the calls whose numbers change. Each of them
is a segment of its own and is interpreted, so that all other segments stay equal: after two captures nothing
is compiled for a third value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import copied
from retrograd._torch.trace import Traced, fake_mode_of, fake_of
from retrograd.graph.backward_graph import BackwardGraph, CallKind
from retrograd.graph.emit import Boxed
from retrograd.graph.structure import places_of, structure_and_numbers, written
from retrograd.process import Recent
from retrograd.repeats.outline import metadata_of

#: as texts.
Numbers = tuple[str, ...]
#: a number's place in a graph: the node whose second operand it is, counted from the first.
Place = int

#: how many members are remembered, so that a number that never stays the same costs no memory.
KEPT_MEMBERS = 128

_ATEN = torch.ops.aten

#: operators whose second operand may be a tensor instead of a number, and which they are then.
_TAKES_TENSOR: dict[Any, Any] = {
    _ATEN.add.Tensor: _ATEN.add.Tensor,
    _ATEN.add.Scalar: _ATEN.add.Tensor,
    _ATEN.mul.Tensor: _ATEN.mul.Tensor,
    _ATEN.mul.Scalar: _ATEN.mul.Tensor,
    _ATEN.sub.Tensor: _ATEN.sub.Tensor,
    _ATEN.sub.Scalar: _ATEN.sub.Tensor,
}

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Lifted:
    """Code that takes numbers as further inputs."""

    graph: fx.Graph
    places: tuple[Place, ...]
    run: Boxed

    def code_for(self, traced: Traced) -> Boxed | None:
        """The code with the numbers of another segment; None if that differs in anything else."""
        differing = _differences(self.graph, traced.gm.graph)
        if differing is None or not set(differing) <= set(self.places):
            return None
        return _with_numbers(self.run, traced.gm.graph, self.places)


@dataclass(eq=False)
class Family:
    """Segments that differ only in their numbers.

    Attributes:
        members: by their numbers, how one of them is traced for given values.
        lifted: code that several of them run.
    """

    members: dict[Numbers, Callable[[Sequence[Any]], Traced]] = field(default_factory=dict)
    lifted: list[Lifted] = field(default_factory=list)

    def join(self, numbers: Numbers, trace: Callable[[Sequence[Any]], Traced]) -> None:
        """A member: its numbers, and how it is traced for given values."""
        if len(self.members) < KEPT_MEMBERS:
            self.members.setdefault(numbers, trace)

    def code_for(
        self,
        numbers: Numbers,
        traced: Traced,
        args: Sequence[Any],
        compile: Callable[[fx.GraphModule, Sequence[Any]], Boxed],
    ) -> Boxed | None:
        """Code for the member with these numbers, which has been traced for `args`; None if it has to be
        compiled for itself."""
        if len(self.members) < 2 or traced.shape_env is not None:
            return None
        for lifted in self.lifted:
            if (code := lifted.code_for(traced)) is not None:
                return code
        other = next(trace for key, trace in self.members.items() if key != numbers)(args)
        places = _differences(traced.gm.graph, other.gm.graph)
        if not places:
            return None
        gm, fakes = _lift(traced, places)
        made = Lifted(copied(traced.gm.graph), places, compile(gm, [*traced.example_inputs, *fakes]))
        self.lifted.append(made)
        return made.code_for(traced)


def _differences(one: fx.Graph, other: fx.Graph) -> tuple[Place, ...] | None:
    """Where two graphs have different numbers that can be lifted; None if they differ in anything else."""
    if len(one.nodes) != len(other.nodes):
        return None
    sides = places_of(one.nodes), places_of(other.nodes)
    places: list[Place] = []
    for i, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        numbers: tuple[list[str], list[str]] = [], []
        if a.op != b.op or (a.op != "placeholder" and a.target != b.target):
            return None
        if metadata_of(a.meta.get("val")) != metadata_of(b.meta.get("val")):
            return None
        if written(a, sides[0], numbers[0]) != written(b, sides[1], numbers[1]):
            return None
        if numbers[0] != numbers[1]:
            if len(numbers[0]) != 1 or not _is_liftable(a):
                return None
            places.append(i)
    return tuple(places)


def _is_liftable(node: fx.Node) -> bool:
    first, value = node.args[0], node.meta.get("val")
    operand = first.meta.get("val") if isinstance(first, fx.Node) else None
    return (
        node.target in _TAKES_TENSOR
        and type(node.args[1]) is float
        and isinstance(operand, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and operand.dim() > 0
        and operand.dtype == value.dtype
        and value.dtype in _DTYPES
    )


def _lift(traced: Traced, places: Sequence[Place]) -> tuple[fx.GraphModule, list[Any]]:
    """The graph with the numbers at `places` as further inputs, and fakes of these."""
    graph = copied(traced.gm.graph)
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    fakes: list[Any] = []
    for i in places:
        node = nodes[i]
        source: Any = node.args[0]
        mode = fake_mode_of(source.meta["val"])
        assert mode is not None
        fake = fake_of(mode, _tensor(0.0, source.meta["val"].device), f"number_{len(fakes)}", ())
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(nodes[0]):
            number = graph.placeholder(f"number_{len(fakes)}")
        number.meta["val"] = fake
        inputs.append(number)
        fakes.append(fake)
        node.update_arg(1, number)
        node.target = _TAKES_TENSOR[node.target]
    return fx.GraphModule(traced.gm, graph), fakes


def _with_numbers(run: Boxed, graph: fx.Graph, places: Sequence[Place]) -> Boxed:
    """`run`, given the numbers that stand in `graph` at `places`."""
    nodes = list(graph.nodes)
    numbers = [_tensor(nodes[i].args[1], nodes[i].meta["val"].device) for i in places]

    def code(args: list[Any]) -> Sequence[Any]:
        args.extend(numbers)
        return run(args)

    return code


def _tensor(number: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device=device)


# numbers that change from capture to capture


class _Numbers:
    """The numbers in the calls of one structure: what they were last, and which calls' have changed."""

    def __init__(self) -> None:
        self.last: tuple[tuple[str, ...], ...] | None = None
        self.changing: dict[int, str] = {}

    def see(self, names: list[str], now: tuple[tuple[str, ...], ...]) -> None:
        """Compare with the last capture."""
        for i, (old, new) in enumerate(zip(self.last or now, now, strict=True)):
            if old != new:
                self.changing.setdefault(i, f"{names[i]} had {', '.join(old)}, now {', '.join(new)}")
        self.last = now


#: by structure without the numbers.
_numbers: Recent[_Numbers] = Recent()


def changing_numbers(backward: BackwardGraph) -> dict[fx.Node, str]:
    """The calls whose numbers differ between captures, with the two values that differed first.

    Only calls of nodes: what a hook or a Function is given does not reach a segment.
    """
    structure, numbers = structure_and_numbers(backward)
    if structure is None or not any(numbers.values()):
        return {}
    nodes = list(numbers)
    known, _ = _numbers.get(structure, _Numbers)
    known.see([str(getattr(node.target, "__name__", node.target)) for node in nodes], tuple(numbers.values()))
    functional = {node for node, call in backward.calls() if call.kind is CallKind.NODE}
    return {nodes[i]: text for i, text in known.changing.items() if nodes[i] in functional}
