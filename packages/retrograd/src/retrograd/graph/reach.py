"""Reachability in graphs of any kind.

`reached`: In: where to begin, and the successors of each thing. Out: all reachable things, in order of
discovery.

`origins`: In: things in order, and the direct predecessors of each. Out: for each thing, its topmost
ancestors.

`bits_reaching`: In: an FX graph, and bits for some nodes. Out: for each node, the bits of all nodes on which
it depends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from torch import fx

Thing = TypeVar("Thing", bound=Hashable)


def reached(start: Iterable[Thing], following: Callable[[Thing], Iterable[Thing]]) -> dict[Thing, None]:
    """`start` and everything reachable from it, nearest first."""
    found = dict.fromkeys(start)
    waiting = list(found)
    for thing in waiting:  # grows while it is read
        for other in following(thing):
            if other not in found:
                found[other] = None
                waiting.append(other)
    return found


def origins(
    things: Iterable[Thing], above: Callable[[Thing], Iterable[Thing]]
) -> dict[Thing, frozenset[Thing]]:
    """For each of `things`, which come in order, its topmost ancestors; itself if it has none."""
    found: dict[Thing, frozenset[Thing]] = {}
    for thing in things:
        sources = (found.get(other, frozenset((other,))) for other in above(thing))
        found[thing] = frozenset[Thing]().union(*sources) or frozenset((thing,))
    return found


def bits_reaching(graph: fx.Graph, bits: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, its own `bits` and those of all nodes on which it depends."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = bits.get(node, 0)
        for value in node.all_input_nodes:
            found[node] |= found[value]
    return found
