"""Which cotangents each node of a joint graph depends on.

In: the graph of a joint graph and its signature. Out: for each node a set of boundaries, as the bits of one
    number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from retrograd.graph.joint import Cotangent, JointSignature


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
