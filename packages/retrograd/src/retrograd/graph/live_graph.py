"""The autograd graph as it hangs from the roots of one backward, as plain indices.

In: filled by ``_torch.autograd.live_graph``. Out: read by the simulation of the engine's walks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Edge(NamedTuple):
    """An edge to input number `slot` of the node with index `node` in the live graph."""

    node: int
    slot: int


@dataclass(frozen=True)
class LiveNode:
    """One autograd node.

    Attributes:
        handle: the ``torch.autograd.graph.Node`` itself (keeps it alive and identical).
        name: what ``handle.name()`` says.
        sequence: its sequence number; AccumulateGrad has the largest there is.
        edges: one entry per gradient it produces, None where nobody wants it.
    """

    handle: Any
    name: str
    sequence: int
    edges: tuple[Edge | None, ...]


@dataclass(frozen=True)
class LiveGraph:
    """All nodes reachable from the roots.

    Attributes:
        nodes: in order of discovery from the roots.
        roots: one edge per root of the backward.
        wanted: indices of nodes that would be executed or captured; None when all of them are
            (``.backward()`` without ``inputs=``).
    """

    nodes: tuple[LiveNode, ...]
    roots: tuple[Edge, ...]
    wanted: frozenset[int] | None
