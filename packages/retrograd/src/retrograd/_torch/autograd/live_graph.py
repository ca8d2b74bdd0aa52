"""Read the autograd graph that hangs from a backward's roots.

In: an `EngineRequest`. Out: a `LiveGraph`, and an `OrderCheck` of later backwards of equal structure. Follows
``next_functions``; the rule for which nodes are wanted with ``inputs=`` is that of
``GraphTask::init_to_execute`` in ``torch/csrc/autograd/engine.cpp``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograd._torch.autograd.engine import EngineRequest
from retrograd.graph.eager_order import Edge, LiveGraph, LiveNode, contests
from retrograd.graph.emit import Emitter
from retrograd.graph.reach import reached


def read_ranks(request: EngineRequest) -> tuple[int, ...]:
    """The nodes of `request`, numbered in order of discovery, sorted by sequence number.

    Two backwards of equal structure run in the same eager order if these are equal. Read on every backward
    whose order is visible, so it reads nothing else.
    """
    numbers = [handle._sequence_nr() for handle in nodes_below(request.tensors)]
    return tuple(sorted(range(len(numbers)), key=numbers.__getitem__))


def names_of_nodes(request: EngineRequest) -> tuple[str, ...]:
    """The names of all nodes of `request`, in order of discovery: equal for backwards of equal structure."""
    return tuple([handle.name() for handle in nodes_below(request.tensors)])


def beginning_of(request: EngineRequest) -> tuple[tuple[str, ...], ...]:
    """The names of the roots' nodes and of those below them: equal for equal backwards."""
    roots = [edge_of(root)[0] for root in request.tensors]
    below = [node for root in roots if root is not None for node, _ in root.next_functions]
    return tuple(tuple("" if n is None else n.name() for n in nodes) for nodes in (roots, below))


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes below the roots, nearest first."""
    seen: dict[Any, None] = dict.fromkeys(node for node, _ in map(edge_of, roots) if node is not None)
    handles = list(seen)
    for handle in handles:  # grows while it is read
        yield handle
        for node, _ in handle.next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                handles.append(node)


def graph_below(edges: Iterable[tuple[Any, int]], ends: Container[Any] = ()) -> LiveGraph:
    """The graph below `edges` (a node and which of its inputs), in order of discovery, not beyond `ends`."""
    index = _Numbers()
    roots = tuple([Edge(index[node], slot) for node, slot in edges])
    nodes: list[LiveNode] = []
    for handle in index.handles:  # grows while it is read
        below = () if handle in ends else handle.next_functions
        after = tuple([None if node is None else Edge(index[node], slot) for node, slot in below])
        nodes.append(LiveNode(handle, handle.name(), handle._sequence_nr(), after))
    return LiveGraph(tuple(nodes), roots, None)


def passes_through_function(value: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a Function in Python stands between the history of `value` and that of `base`."""
    end, _ = edge_of(base) if base.requires_grad else (None, 0)
    nodes = graph_below([edge_of(value)], (end,)).nodes if value.grad_fn is not None else ()
    return any(hasattr(node.handle, "apply") for node in nodes if node.handle is not end)


class _Numbers(dict[Any, int]):
    """Numbers nodes as they are asked for; `handles` are those that have one, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []

    def __missing__(self, handle: Any) -> int:
        self[handle] = number = len(self.handles)
        self.handles.append(handle)
        return number


def read_live_graph(request: EngineRequest) -> LiveGraph:
    """The graph of `request`, in order of discovery from its roots."""
    graph = graph_below(map(edge_of, request.tensors))
    index = {node.handle: number for number, node in enumerate(graph.nodes)}
    targets = [index[node] for node, _ in map(edge_of, request.inputs) if node in index]
    return replace(graph, wanted=_wanted(graph.nodes, targets)) if request.inputs else graph


def forward_line(node: Any) -> str:
    """The user's line that made `node`: ``model.py:88  y = x.sin()``; torch records it if the forward ran in
    anomaly mode. Else, for an ``autograd.Function``, where its backward is: ``model.py:12  Exp.backward``;
    else empty."""
    frames = node.metadata.get("traceback_")
    found = re.search(r'File "([^"]+)", line (\d+).*\n\s*(.*)', frames[-1]) if frames else None
    if found:
        return f"{os.path.basename(found[1])}:{found[2]}  {found[3].strip()}"
    function: Any = getattr(node, "_forward_cls", None)
    backward: Any = getattr(function, "backward", None)
    code = getattr(backward, "__code__", None)
    if code is None or (function.__module__ or "").startswith("torch."):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}  {backward.__qualname__}"


def edge_of(root: Any) -> tuple[Any, int]:
    """The autograd node of a tensor or ``GradientEdge``, and which of its outputs it is."""
    if isinstance(root, GradientEdge):
        return root.node, root.output_nr
    if isinstance(root, torch.Tensor) and (root.grad_fn is not None or root.requires_grad):
        if root.grad_fn is None and root.layout is not torch.strided:  # torch asks a view, which has none
            with torch.enable_grad():
                return root.clone().grad_fn.next_functions[0]  # type: ignore[union-attr]
        edge = get_gradient_edge(root)
        return edge.node, edge.output_nr
    return None, 0


def _wanted(nodes: Sequence[LiveNode], targets: list[int]) -> frozenset[int]:
    """Nodes from which a target can be reached, the targets included."""
    producers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for edge in node.edges:
            if edge is not None:
                producers.setdefault(edge.node, []).append(i)
    return frozenset(reached(targets, lambda node: producers.get(node, ())))


class OrderCheck:
    """The order of one backward of the whole graph, for others of equal structure. It walks only to the nodes
    whose numbers eager compares, in generated code: it runs before every backward whose order is visible.
    """

    def __init__(self, live: LiveGraph, steps: Mapping[int, Sequence[Sequence[int]]]) -> None:
        emit = Emitter("compare(roots)")
        for line in _lines(live, contests(live, steps)):
            emit.line(line)
        self._compare = emit.function()

    def holds(self, request: EngineRequest) -> bool:
        """Whether eager would run `request` in the same order, if its structure is the same."""
        try:
            return self._compare([edge_of(root)[0] for root in request.tensors])
        except (AttributeError, IndexError, TypeError, ValueError):
            return False  # it is not


def _lines(live: LiveGraph, pairs: Sequence[tuple[int, int]]) -> Iterator[str]:
    wanted = {node for pair in pairs for node in pair}
    parents = _first_edges(live)
    on_the_way = set(wanted)
    for node in sorted(wanted):
        while node in parents and parents[node][0] not in on_the_way:
            node = parents[node][0]
            on_the_way.add(node)
    below: dict[int, list[tuple[int, int]]] = {}
    for node in sorted(on_the_way):
        if node in parents:
            parent, edge = parents[node]
            below.setdefault(parent, []).append((node, edge))
    for place, root in enumerate(live.roots):
        yield f"n{root.node} = roots[{place}]"
    # In order of discovery a node stands behind the one by which it is found.
    for node in sorted(on_the_way):
        yield from _step(node, below.get(node, []), node in wanted)
    terms = [f"s{first} > s{second}" for first, second in pairs]
    yield f"return {' and '.join(terms) or True}"


def _step(node: int, below: Sequence[tuple[int, int]], is_wanted: bool) -> Iterator[str]:
    if is_wanted:
        yield f"s{node} = n{node}._sequence_nr()"
    if len(below) == 1:
        child, edge = below[0]
        yield f"n{child} = n{node}.next_functions[{edge}][0]"
    elif below:
        yield f"f = n{node}.next_functions"
        for child, edge in below:
            yield f"n{child} = f[{edge}][0]"


def _first_edges(live: LiveGraph) -> dict[int, tuple[int, int]]:
    """By which edge of which node each node is discovered; roots are given."""
    roots = {root.node for root in live.roots}
    found: dict[int, tuple[int, int]] = {}
    for number, node in enumerate(live.nodes):
        for place, edge in enumerate(node.edges):
            if edge is not None and edge.node not in found and edge.node not in roots:
                found[edge.node] = (number, place)
    return found
