"""Cut regions into blocks, so that gradients of leaves become visible one by one.

In: an autograd graph, the region of each of its nodes, and the leaves whose gradients somebody waits for.
Out: the same regions in smaller pieces: each ends with a node that completes the gradient of such a leaf.

A region gives all its gradients at once. If hooks take gradients away as soon as they have accumulated (an
optimizer in backward), eager has few of them at a time; a region cut into blocks has as few as a block makes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from retrograd.graph.eager_order import LiveGraph

#: more cuts than this are thinned out: each costs a node and a call.
MOST_BLOCKS = 32


def cut_into_blocks(
    graph: LiveGraph,
    primals: Mapping[int, int],
    order: Sequence[int],
    region_of: Mapping[int, Hashable],
    hooked_leaves: Collection[int],
) -> dict[int, Hashable]:
    """For each node that does not accumulate: its region and the number of its block.

    Args:
        graph, primals, order: as in ``structure``.
        region_of: by node that does not accumulate.
        hooked_leaves: primals after whose gradients to cut.
    """
    nodes: dict[Hashable, list[int]] = {}
    for node in order:
        if node not in primals:
            nodes.setdefault(region_of[node], []).append(node)
    cuts = {region: _cuts(graph, primals, inside, hooked_leaves) for region, inside in nodes.items()}
    every = -(-sum(map(len, cuts.values())) // MOST_BLOCKS) or 1
    blocks: dict[int, Hashable] = {}
    for region, inside in nodes.items():
        chosen = set(cuts[region][every - 1 :: every])
        block = 0
        for place, node in enumerate(inside):
            blocks[node] = (region, block)
            block += place in chosen
    return blocks


def _cuts(
    graph: LiveGraph, primals: Mapping[int, int], nodes: Sequence[int], hooked_leaves: Collection[int]
) -> list[int]:
    """Places among `nodes` after which to cut, in order: those that complete an hooked_leaves gradient, but
    for the last node, and but for those at which a sum would be made in another order.

    A block adds up what it gives to one place before anything else is added. That is eager's sum if, of those
    that give to one place, only one comes after the cut.
    """
    given: dict[Hashable, list[int]] = {}
    for place, node in enumerate(nodes):
        for edge in graph.nodes[node].edges:
            if edge is not None:
                given.setdefault(edge, []).append(place)
    completed = {
        places[-1]
        for edge, places in given.items()
        if edge.node in primals and primals[edge.node] in hooked_leaves  # type: ignore[attr-defined]
    }
    return [
        place
        for place in sorted(completed)
        if place < len(nodes) - 1
        and not any(
            places[0] <= place and len(places) > 2 and places[-2] > place for places in given.values()
        )
    ]
