"""The joint graph of a function: (primals, cotangents) -> (outputs, gradients).

In: made by ``aot.capture``; changed by passes. Out: read by ``aot.partition`` and ``aot.export``.

Eager's autograd graph of a function is divided into *regions*, so that what a user can see of it stays: a
border runs through every *boundary*, which is a differentiable output of the function, or a tensor inside it
where the graphs of two outputs meet. A region takes the cotangents of its roots and gives gradients for its
destinations: primals, or boundaries further down. A function with one output has one region.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx


class PrimalKind(enum.Enum):
    """Where a primal comes from."""

    ARGUMENT = "argument"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    SIZE = "size"  # a symbolic integer


@dataclass(frozen=True)
class Primal:
    """An input: its number among the primals, and a name for people (``args[0]``, ``layer.weight``).

    A wrapper subclass has several placeholders, its inner tensors: `part` numbers them. So it is with the
    other roles.
    """

    index: int
    name: str
    kind: PrimalKind = PrimalKind.ARGUMENT
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


@dataclass(frozen=True)
class Cotangent:
    """What flows backward into a boundary."""

    boundary: int
    part: int = 0

    def __str__(self) -> str:
        return f"cotangent of boundary {self.boundary}"


@dataclass(frozen=True)
class Output:
    """A value that the forward half computes: its number among those."""

    index: int
    part: int = 0

    def __str__(self) -> str:
        return f"output {self.index}"


@dataclass(frozen=True)
class Destination:
    """Where a gradient goes: a primal, or (if `is_boundary`) a boundary further down.

    Where several regions contribute to one gradient, each hands over its contributions one by one, numbered,
    so that the engine adds them up in eager's order.
    """

    index: int
    is_boundary: bool = False
    number: int = 0

    def __str__(self) -> str:
        return f"{'boundary' if self.is_boundary else 'primal'} {self.index}"


@dataclass(frozen=True)
class Gradient:
    """What one region adds to the gradient of one destination."""

    region: int
    of: Destination
    part: int = 0

    def __str__(self) -> str:
        return f"gradient of {self.of} from region {self.region}"


InputRole = Primal | Cotangent
OutputRole = Output | Gradient


@dataclass(frozen=True)
class Boundary:
    """A tensor at which regions meet.

    Attributes:
        value: the forward value that it belongs to (`Output.index`). One that the user does not see has a
            stand-in of its shape without elements.
        is_visible: whether the user sees it.
    """

    value: int
    is_visible: bool = True


@dataclass(frozen=True)
class Region:
    """A part of eager's autograd graph that runs as one node."""

    roots: tuple[int, ...]
    destinations: tuple[Destination, ...]


@dataclass(frozen=True)
class BackwardStep:
    """One step of a whole backward, in eager's order: a region runs, or (if `is_leaf`) the gradient of a
    primal is complete and handed on to it."""

    index: int
    is_leaf: bool = False


@dataclass(frozen=True)
class JointSignature:
    """What every placeholder and every output of a joint graph means.

    Attributes:
        inputs: one role per placeholder, primals first.
        outputs: one role per output: `Output` first, then `Gradient`, region by region.
        boundaries, regions: eager's structure.
        order: the steps of a backward that takes all cotangents, as eager would order them.
    """

    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    boundaries: tuple[Boundary, ...] = ()
    regions: tuple[Region, ...] = ()
    order: tuple[BackwardStep, ...] = ()

    @property
    def primals(self) -> tuple[Primal, ...]:
        """The primals, in the order of their placeholders."""
        return tuple(role for role in self.inputs if isinstance(role, Primal))

    @property
    def parameter_gradients(self) -> list[int]:
        """Which outputs are gradients of parameters, in the order of the parameters."""
        primals = self.primals
        found = [
            (role.of.index, place)
            for place, role in enumerate(self.outputs)
            if isinstance(role, Gradient) and not role.of.is_boundary
            if primals[role.of.index].kind is PrimalKind.PARAMETER
        ]
        return [place for _, place in sorted(found)]

    @property
    def forward_count(self) -> int:
        """How many outputs belong to the forward."""
        return sum(not isinstance(role, Gradient) for role in self.outputs)


def cotangents_reaching(graph: fx.Graph, signature: JointSignature) -> Mapping[fx.Node, int]:
    """For each node, the boundaries whose cotangents it depends on; 0 for a node of the forward.

    Raises:
        ValueError: the number of placeholders is not that of the signature's inputs.
    """
    placeholders = graph.find_nodes(op="placeholder")
    roles = dict(zip(placeholders, signature.inputs, strict=True))
    reaching: dict[fx.Node, int] = {}
    for node in graph.nodes:
        role = roles.get(node)
        bits = 1 << role.boundary if isinstance(role, Cotangent) else 0
        for value in node.all_input_nodes:
            bits |= reaching[value]
        reaching[node] = bits
    return reaching


def bits_of(boundaries: Iterable[int]) -> int:
    """A set of boundaries as the bits of one number."""
    return sum(1 << boundary for boundary in set(boundaries))


def boundaries_in(bits: int) -> list[int]:
    """The boundaries whose bits are set, ascending."""
    return [boundary for boundary in range(bits.bit_length()) if bits >> boundary & 1]
