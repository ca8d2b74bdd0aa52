"""What can be reached in a graph of any kind, and from where.

In: where to begin, and what follows each thing. Out: all that is reached, in order of discovery.

In: things in order, and what is directly above each. Out: for each thing, the topmost ones that it comes
from.

In: an FX graph, and a number of one bit for some nodes. Out: for each node the bits of all that lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from torch import fx

Thing = TypeVar("Thing", bound=Hashable)


def reached(start: Iterable[Thing], following: Callable[[Thing], Iterable[Thing]]) -> dict[Thing, None]:
    """`start` and all that follows from it, nearest first."""
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
    """For each of `things`, which come in order, where it comes from in the end; from itself, if nothing is
    above it."""
    found: dict[Thing, frozenset[Thing]] = {}
    for thing in things:
        sources = (found.get(other, frozenset((other,))) for other in above(thing))
        found[thing] = frozenset[Thing]().union(*sources) or frozenset((thing,))
    return found


def bits_reaching(graph: fx.Graph, bits: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, its own `bits` and those of all that it depends on."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = bits.get(node, 0)
        for value in node.all_input_nodes:
            found[node] |= found[value]
    return found
