"""Layers that differ in a number share their code: the number becomes an input of it.

In: segments that are equal but for floating point numbers, traced. Out: one ATen graph in which numbers that
differ are inputs, and the numbers of each segment. A number is lifted only where a tensor in its place
computes the same to the bit: as the second operand of a sum, difference or product of a tensor of the same
floating point dtype that is not a scalar itself. Segments that differ in anything else keep their own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import copied
from retrograd._torch.trace import Traced, fake_mode_of, fake_of
from retrograd.backends.base import Boxed

Numbers = tuple[float, ...]
#: a number's place in a graph: which node, counted from the first, and which argument.
Place = tuple[int, int]

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
    """Code that takes numbers as further inputs.

    Attributes:
        graph: the graph of one of the segments that it runs. places: of the numbers that it takes.
        run: the code.
    """

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
    """Segments that are equal but for their numbers.

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
        if len(self.members) < 2 or traced.shape_env is not None or traced.history is not None:
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
    same: dict[fx.Node, fx.Node] = {}
    places: list[Place] = []
    for i, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        if a.op != b.op or (a.op != "placeholder" and a.target != b.target):
            return None
        if not _are_alike(a.meta.get("val"), b.meta.get("val")):
            return None
        same[a] = b
        for at, (x, y) in enumerate(_pairs(a, b)):
            if _agree(x, y, same):
                continue
            if not (at == 1 and type(x) is type(y) is float and _is_liftable(a)):
                return None
            places.append((i, at))
    return tuple(places)


def _pairs(a: fx.Node, b: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Arguments in the same places; what one of them lacks differs from everything."""
    if len(a.args) != len(b.args):
        yield a, None
    yield from zip(a.args, b.args, strict=False)
    yield a.kwargs, b.kwargs


def _agree(x: Any, y: Any, same: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(x, fx.Node):
        return same.get(x) is y
    if isinstance(x, (list, tuple)):
        return (
            isinstance(y, (list, tuple))
            and len(x) == len(y)
            and all(_agree(p, q, same) for p, q in zip(x, y, strict=True))
        )
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(_agree(x[k], y[k], same) for k in x)
    if isinstance(x, float):
        return type(y) is float and repr(x) == repr(y)  # repr tells 0.0 from -0.0, and nan equals itself
    return type(x) is type(y) and bool(x == y)


def _are_alike(x: Any, y: Any) -> bool:
    """Whether two values have one metadata."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y)
    return (x.shape, x.dtype, x.device, x.stride()) == (y.shape, y.dtype, y.device, y.stride())


def _is_liftable(node: fx.Node) -> bool:
    first, value = node.args[0], node.meta.get("val")
    operand = first.meta.get("val") if isinstance(first, fx.Node) else None
    return (
        node.target in _TAKES_TENSOR
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
    for i, at in places:
        node = nodes[i]
        source: Any = nodes[i].args[0]
        mode = fake_mode_of(source.meta["val"])
        assert mode is not None
        fake = fake_of(mode, _tensor(0.0, source.meta["val"].device), f"number_{len(fakes)}", ())
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(nodes[0]):
            number = graph.placeholder(f"number_{len(fakes)}")
        number.meta["val"] = fake
        inputs.append(number)
        fakes.append(fake)
        node.update_arg(at, number)
        node.target = _TAKES_TENSOR[node.target]
    return fx.GraphModule(traced.gm, graph), fakes


def _with_numbers(run: Boxed, graph: fx.Graph, places: Sequence[Place]) -> Boxed:
    """`run`, given the numbers that stand in `graph` at `places`."""
    nodes = list(graph.nodes)
    numbers = [_tensor(nodes[i].args[at], nodes[i].meta["val"].device) for i, at in places]

    def code(args: list[Any]) -> Sequence[Any]:
        args.extend(numbers)
        return run(args)

    return code


def _tensor(number: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device=device)
