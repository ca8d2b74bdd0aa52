"""What a minimum cut saves of a deep model, chosen in a model of fewer layers.

In: a joint graph in which copies of a run follow each other (`Chain`, from the capture), and a cut. Out: the
names that the cut saves. It is made in a graph without most of the copies; those that are left out save what
the copies beside them save. If two neighbours that stay save different values, all of the graph is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from retrograd._torch.fx import add_copy, lazy_graph_module
from retrograd.graph.joint import output_values

#: copies that stay: from the first, and from the last.
_FIRST, _LAST = 3, 2
#: a chain is worth it from so many copies on.
FEWEST = _FIRST + _LAST + 2

#: names of nodes, by number of a copy, with whether it is a copy in memory of what has that number.
Picked = set[tuple[int, bool]]
Cut = Callable[[fx.GraphModule], Sequence[str]]


@dataclass(frozen=True)
class Chain:
    """Copies of a run, each of which is given what the one before it makes.

    Attributes:
        copies: the names of the nodes of each by number: inputs, cotangent, calls.
        calls: the number of the first call.
        cotangent, made: numbers of the cotangent, and of what goes on to the next copy.
    """

    copies: Sequence[Sequence[str]]
    calls: int
    cotangent: int
    made: int

    @property
    def left_out(self) -> Sequence[Sequence[str]]:
        """The copies that a shorter graph has not."""
        return self.copies[_FIRST:-_LAST]


def cut_shorter(
    gm: fx.GraphModule, forward_count: int, chains: Sequence[Chain], cut: Cut
) -> list[str] | None:
    """What `cut` saves of `gm`; None if a shorter graph cannot say.

    Args:
        gm: the joint graph; stays as it is. forward_count: how many of its results are the forward's.
    """
    named = {node.name: node for node in gm.graph.nodes}
    graph = _shorter(gm.graph, named, chains, forward_count)
    if graph is None:
        return None
    saved = set(cut(lazy_graph_module(gm, graph)))
    for chain in chains:
        one, other = (_picked(chain.copies[i], saved, named) for i in (_FIRST - 2, _FIRST - 1))
        if one != other:
            return None
        for copy in chain.left_out:
            saved.update(_names(copy, one, named))
    return [node.name for node in gm.graph.nodes if node.name in saved]


def _shorter(
    graph: fx.Graph, named: dict[str, fx.Node], chains: Sequence[Chain], forward_count: int
) -> fx.Graph | None:
    """The graph, whose nodes are `named`, without the copies that are left out; None if others need them."""
    gone, instead = set[fx.Node](), dict[fx.Node, fx.Node]()

    def read(value: fx.Node) -> fx.Node:
        while value in instead:
            value = instead[value]
        return value

    for chain in chains:
        before, last = chain.copies[_FIRST - 1], chain.left_out[-1]
        bridges = [(last[chain.made], before[chain.made]), (before[chain.cotangent], last[chain.cotangent])]
        if any(name not in named for bridge in bridges for name in bridge):
            return None
        instead.update((named[one], named[other]) for one, other in bridges)
        gone.update(named[name] for copy in chain.left_out for name in copy[chain.calls :] if name in named)
    *nodes, results = graph.nodes
    for node in nodes:
        values = [*map(read, node.all_input_nodes)]
        if node in gone or gone.isdisjoint(values):
            continue
        # All that may read them is a sum of contributions to a gradient, which others may contribute to.
        if node.target is not torch.ops.aten.add.Tensor or not node.meta.get("is_backward"):
            return None
        gone.add(node)
        instead.update((node, value) for value in values if value not in gone)
    given = [read(value) if isinstance(value, fx.Node) else value for value in output_values(graph)]
    if gone.intersection(given[:forward_count]):
        return None
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in gone:
            made[node] = add_copy(copy, node, lambda value: made[read(value)])
    output = copy.output(tuple([made.get(value, value) for value in given if value not in gone]))
    output.meta.update(results.meta)
    return copy


def _picked(copy: Sequence[str], saved: Collection[str], named: dict[str, fx.Node]) -> Picked:
    """What of a copy is saved."""
    numbers = {name: number for number, name in enumerate(copy)}
    found = {(numbers[name], False) for name in saved if name in numbers}
    for name in saved:
        node = named[name]
        if name not in numbers and node.target is torch.ops.aten.clone.default:
            made_of = node.args[0]
            if isinstance(made_of, fx.Node) and made_of.name in numbers:
                found.add((numbers[made_of.name], True))
    return found


def _names(copy: Sequence[str], picked: Picked, named: dict[str, fx.Node]) -> list[str]:
    """The names of the same values of another copy."""
    inside, found = set(copy), []
    for number, is_clone in picked:
        node = named.get(copy[number])
        if node is not None and not is_clone:
            found.append(node.name)
        elif node is not None:
            clones = (user for user in node.users if user.target is torch.ops.aten.clone.default)
            found += [user.name for user in clones if user.name not in inside]
    return found
