"""The order in which the engine's capture walk, and eager, visit the nodes of a live graph.

In: a `LiveGraph`, the autograd graph below the roots of one backward, filled by ``engine.request``. Out: two
orders of its nodes' indices.

`engine_walk` is the last-in-first-out walk of ``_compiled_autograd_impl``
(``torch/csrc/dynamo/python_compiled_autograd.cpp``). `eager_walk` is the ready queue of
``Engine::thread_main`` (``torch/csrc/autograd/engine.cpp``): a ``std::priority_queue`` by sequence number
with AccumulateGrad on top. The order of nodes with equal priority (several AccumulateGrad) depends on how the
binary heap sifts. Python's ``heapq`` sifts as libstdc++ does.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Edge(NamedTuple):
    """An edge to input number `slot` of the node with index `node` in the live graph."""

    node: int
    slot: int


@dataclass(frozen=True)
class LiveNode:
    """One autograd node.

    Attributes:
        handle: the ``torch.autograd.graph.Node`` itself. The reference keeps it alive, and its identity
            unique.
        name: the result of ``handle.name()``.
        sequence: its sequence number; AccumulateGrad has the largest possible one.
        edges: one entry per gradient it produces; None if that gradient goes nowhere.
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
        wanted: indices of nodes that the engine would execute or capture; None for all of them
            (``.backward()`` without ``inputs=``).
    """

    nodes: tuple[LiveNode, ...]
    roots: tuple[Edge, ...]
    wanted: frozenset[int] | None


#: The GraphRoot node, which is in every capture walk and in no live graph.
ROOT = -1

#: The sequence number of AccumulateGrad.
ACCUMULATES = 2**64 - 1


def engine_walk(live: LiveGraph) -> list[int]:
    """Node indices in the capture's order. Element 0 is `ROOT`."""
    ready = _Readiness(live)
    stack, order = [ROOT], []
    while stack:
        node = stack.pop()
        order.append(node)
        ready.release(node, stack.append)
    return order


def eager_walk(live: LiveGraph) -> list[int]:
    """Node indices in the order in which eager executes them. Element 0 is `ROOT`."""
    ready = _Readiness(live)

    def difference(one: int, other: int) -> int:
        return live.nodes[other].sequence - live.nodes[one].sequence

    def push(node: int) -> None:
        heapq.heappush(heap, entry(node))

    # Entries compare by sequence number only. The heap's sift decides between equal ones.
    order, heap, entry = [ROOT], list[Any](), functools.cmp_to_key(difference)
    ready.release(ROOT, push)
    while heap:
        node = heapq.heappop(heap).obj
        order.append(node)
        ready.release(node, push)
    return order


def with_steps(
    live: LiveGraph, steps: Mapping[int, Sequence[Sequence[int]]]
) -> tuple[LiveGraph, dict[int, list[int]]]:
    """Replace a node by a chain of nodes, one for each step. Each passes on the gradients that are ready
    after its step.

    Args:
        live: the graph.
        steps: for each node to replace, the numbers of the edges that each of its steps serves.

    Returns:
        The graph with the chains, and the nodes of each chain. The first node of a chain has the index of the
            node that it replaces.
    """
    nodes, wanted = list(live.nodes), set(live.wanted or ())
    chains: dict[int, list[int]] = {}
    for index, parts in steps.items():
        if len(parts) > 1:
            chains[index] = [index, *range(len(nodes), len(nodes) + len(parts) - 1)]
            links: list[Edge | None] = [*(Edge(link, 0) for link in chains[index][1:]), None]
            edges = nodes[index].edges
            nodes[index], *rest = [
                replace(nodes[index], edges=(*(edges[i] for i in part), link))
                for part, link in zip(parts, links, strict=True)
            ]
            nodes += rest
            wanted.update(chains[index] if index in wanted else ())
    return replace(live, nodes=tuple(nodes), wanted=live.wanted and frozenset(wanted)), chains


class _Readiness:
    """Counts the gradients that each node is still waiting for."""

    def __init__(self, live: LiveGraph) -> None:
        self._live = live
        self._waiting = [0] * len(live.nodes)
        for edges in (live.roots, *(node.edges for node in live.nodes)):
            for edge in edges:
                if edge is not None:
                    self._waiting[edge.node] += 1

    def release(self, node: int, push: Callable[[int], None]) -> None:
        """Record that `node` was executed, and push each wanted node that is now ready, in the order of its
        edges."""
        wanted = self._live.wanted
        for edge in self._live.roots if node == ROOT else self._live.nodes[node].edges:
            if edge is None:
                continue
            self._waiting[edge.node] -= 1
            if self._waiting[edge.node] == 0 and (wanted is None or edge.node in wanted):
                push(edge.node)


def executed_nodes(live: LiveGraph, accumulates: bool) -> set[int]:
    """Indices of the nodes that eager executes, without AccumulateGrad nodes, which save nothing.

    ``autograd.grad`` only captures the gradients of its inputs. ``backward`` (`accumulates`) also executes
    the inputs' nodes.
    """
    wanted = frozenset(range(len(live.nodes))) if live.wanted is None else live.wanted
    if accumulates:
        return {i for i in wanted if live.nodes[i].edges}
    return {i for i in wanted if any(edge and edge.node in wanted for edge in live.nodes[i].edges)}
