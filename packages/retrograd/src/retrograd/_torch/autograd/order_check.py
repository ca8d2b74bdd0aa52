"""Does a backward of a known structure run in a known order?

In: the graph that hangs from a backward, once. Out: an `OrderCheck`, which compares the sequence numbers of
later backwards of equal structure. It walks only to the nodes whose numbers eager compares, by the edges that
lead there, in generated code: it runs before every backward whose order is visible.

Eager takes the ready node with the highest number. So the order is the same if, whenever nodes are left
waiting, the one that was taken has a higher number than the one of them that is taken next: that one is the
highest of those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from retrograd._torch.autograd.engine import EngineRequest
from retrograd._torch.autograd.live_graph import edge_of
from retrograd.graph.eager_order import contests
from retrograd.graph.live_graph import LiveGraph


class OrderCheck:
    """The order of one backward of the whole graph, for others of equal structure.

    Args:
        live: its graph, as discovered.
        steps: for nodes that stand for several steps, what `graph.eager_order.with_steps` takes.
    """

    def __init__(self, live: LiveGraph, steps: Mapping[int, Sequence[Sequence[int]]]) -> None:
        pairs = contests(live, steps)
        self._roots = len(live.roots)
        self._compare = _function("\n".join(_lines(live, pairs)))

    def holds(self, request: EngineRequest) -> bool:
        """Whether eager would run `request` in the same order, if its structure is the same."""
        try:
            return self._compare([edge_of(root)[0] for root in request.tensors])
        except (AttributeError, IndexError, TypeError, ValueError):
            return False  # it is not


def _function(text: str) -> Callable[[list[Any]], bool]:
    scope: dict[str, Any] = {}
    exec(compile(text, "<order check>", "exec"), scope)
    made: Callable[[list[Any]], bool] = scope["compare"]
    return made


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
    yield "def compare(roots):"
    for place, root in enumerate(live.roots):
        yield f"    n{root.node} = roots[{place}]"
    # In order of discovery a node stands behind the one by which it is found.
    for node in sorted(on_the_way):
        yield from _step(node, below.get(node, []), node in wanted)
    terms = [f"s{first} > s{second}" for first, second in pairs]
    yield f"    return {' and '.join(terms) or True}"


def _step(node: int, below: Sequence[tuple[int, int]], is_wanted: bool) -> Iterator[str]:
    if is_wanted:
        yield f"    s{node} = n{node}._sequence_nr()"
    if len(below) == 1:
        child, edge = below[0]
        yield f"    n{child} = n{node}.next_functions[{edge}][0]"
    elif below:
        yield f"    f = n{node}.next_functions"
        for child, edge in below:
            yield f"    n{child} = f[{edge}][0]"


def _first_edges(live: LiveGraph) -> dict[int, tuple[int, int]]:
    """By which edge of which node each node is discovered; roots are given."""
    roots = {root.node for root in live.roots}
    found: dict[int, tuple[int, int]] = {}
    for number, node in enumerate(live.nodes):
        for place, edge in enumerate(node.edges):
            if edge is not None and edge.node not in found and edge.node not in roots:
                found[edge.node] = (number, place)
    return found
