"""Divide eager's autograd graph into regions, and put them in eager's order.

In: the autograd graph above a function's primals. Out: `Structure`: boundaries, regions with their nodes, and
the order of a whole backward.

Two nodes belong to the same region if the same visible tensors reach them without passing another visible
tensor. So a region is reached as a whole or not at all, whatever outputs a loss is made of. Where an edge
leads from one region into another there is a boundary. (That no two regions wait for each other follows: an
edge that is no visible boundary leads to nodes that are reached by as many roots or more.)

If hooks take gradients of leaves away as soon as they have accumulated (an optimizer in backward), eager has
few of them at a time, while a region gives all its gradients at once. Regions may therefore be cut into
blocks, each of which ends with a node that completes the gradient of such a leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from retrograd.graph.eager_order import ROOT, Edge, LiveGraph, eager_walk, with_steps
from retrograd.graph.joint import BackwardStep, Destination

#: more regions than this, and all outputs are differentiated together.
MOST_REGIONS = 64
#: if one function makes more contributions to a gradient than this, it adds them up itself, because separate
#: contributions occupy memory until the region ends.
MOST_APART = 32


@dataclass(frozen=True)
class RegionNodes:
    """The nodes of a region in the order in which eager runs them; roots are numbers of boundaries.

    Attributes:
        sends: by node and number of its edge, where the gradient goes if it leaves the region.
    """

    nodes: tuple[int, ...]
    roots: tuple[int, ...]
    destinations: tuple[Destination, ...]
    sends: Mapping[tuple[int, int], Destination] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Structure:
    """Eager's autograd graph, divided.

    Attributes:
        boundaries: the edge of each: visible ones first, as given.
        regions: in the order of `order`.
        order: eager's steps when every visible boundary gets a cotangent.
    """

    boundaries: tuple[Edge, ...]
    regions: tuple[RegionNodes, ...]
    order: tuple[BackwardStep, ...]


def divide(
    graph: LiveGraph,
    primals: Mapping[int, int],
    single: bool = False,
    hooked_leaves: Collection[int] = (),
    sums_apart: bool = False,
    steps: Mapping[int, Sequence[Sequence[int]]] = MappingProxyType({}),
) -> Structure:
    """Divide `graph`, whose roots are the edges of the visible tensors.

    Args:
        primals: by node that accumulates: the primal whose gradient it is.
        hooked_leaves: primals whose gradients become visible one by one: regions end where these are
            complete. single, sums_apart: as in ``aot.capture``.
        steps: by node that stands for several of eager's, which of its edges each of these has.
    """
    stepwise, _ = with_steps(graph, steps)
    order = [node for node in eager_walk(stepwise) if node != ROOT and node < len(graph.nodes)]
    reached = _reached_by(graph, primals, order)
    borders = frozenset(graph.roots)
    if single or len(set(reached.values())) > MOST_REGIONS:
        everything = frozenset().union(*reached.values())
        reached, borders = dict.fromkeys(reached, everything), frozenset()
    region_of: Mapping[int, Hashable] = reached
    if hooked_leaves:
        region_of = cut_into_blocks(graph, primals, order, reached, hooked_leaves)
    blocks = cut_between_contributions(graph, primals, order, region_of) if sums_apart else None
    is_cut, leading = blocks is not None, _leading(graph, primals, order)
    region_of = blocks or region_of
    return _Division(graph, primals, order, borders, region_of, sums_apart, is_cut, leading).structure()


def _reached_by(
    graph: LiveGraph, primals: Mapping[int, int], order: Sequence[int]
) -> dict[int, frozenset[int]]:
    """For each node that does not accumulate, the visible tensors that reach it."""
    reached: dict[int, set[int]] = {}
    for boundary, root in enumerate(graph.roots):
        reached.setdefault(root.node, set()).add(boundary)
    borders = set(graph.roots)
    for node in order:
        for edge in () if node in primals else graph.nodes[node].edges:
            if edge is not None and edge not in borders and edge.node not in primals:
                reached.setdefault(edge.node, set()).update(reached[node])
    return {node: frozenset(roots) for node, roots in reached.items()}


def _leading(graph: LiveGraph, primals: Mapping[int, int], order: Sequence[int]) -> set[int]:
    """The nodes, besides those that accumulate, from which a gradient comes to a primal."""
    found: set[int] = set()
    for node in reversed(order):
        below = [edge.node for edge in graph.nodes[node].edges if edge is not None]
        if node not in primals and any(other in primals or other in found for other in below):
            found.add(node)
    return found


@dataclass
class _Division:
    graph: LiveGraph
    primals: Mapping[int, int]
    order: Sequence[int]
    borders: frozenset[Edge]
    region_of: Mapping[int, Hashable]
    sums_apart: bool
    #: whether regions that contribute to one sum one after the other run one after the other
    takes_turns: bool
    #: nodes from which a gradient comes to a primal; the others differentiate a view made under `no_grad`
    leading: Collection[int]
    boundaries: dict[Edge, int] = field(default_factory=dict)

    def structure(self) -> Structure:
        self.boundaries = {edge: number for number, edge in enumerate(self.graph.roots)}
        members: dict[Hashable, list[int]] = {}
        for node in self.order:
            if node not in self.primals:
                members.setdefault(self.region_of[node], []).append(node)
                for edge in self._crossing(node):
                    self.boundaries.setdefault(edge, len(self.boundaries))
        regions = self._apart([self._region(nodes) for nodes in members.values()])
        steps = self._steps(regions)
        run = [step.index for step in steps if not step.is_leaf]
        place = {number: i for i, number in enumerate(run)}  # regions are numbered as they run
        order = tuple(step if step.is_leaf else BackwardStep(place[step.index]) for step in steps)
        return Structure(tuple(self.boundaries), tuple(regions[number] for number in run), order)

    def _crossing(self, node: int) -> Iterator[Edge]:
        """Edges of the node that lead to a primal, through another region."""
        for edge in self.graph.nodes[node].edges:
            if edge is None or edge.node not in self.leading:
                continue
            if edge in self.borders or self.region_of[edge.node] != self.region_of[node]:
                yield edge

    def _region(self, nodes: list[int]) -> RegionNodes:
        inside = set(nodes)
        roots = [number for edge, number in self.boundaries.items() if edge.node in inside]
        sends: dict[tuple[int, int], Destination] = {}
        for node in nodes:
            crossing = set(self._crossing(node))
            for place, edge in enumerate(self.graph.nodes[node].edges):
                if edge in crossing:
                    sends[node, place] = Destination(self.boundaries[edge], True)
                elif edge is not None and edge.node in self.primals:
                    sends[node, place] = Destination(self.primals[edge.node])
        return RegionNodes(tuple(nodes), tuple(roots), tuple(dict.fromkeys(sends.values())), sends)

    def _apart(self, regions: Sequence[RegionNodes]) -> list[RegionNodes]:
        """Keep contributions to a gradient apart, where there are three or more from several regions. With
        `sums_apart`, also those of one region, if contributions from outside the function may be added to
        them; nothing is added from outside to the gradient of a hidden boundary."""
        counts = [Counter(region.sends.values()) for region in regions]
        total = sum(counts, Counter[Destination]())
        shared = {
            there for there in total if total[there] > 2 and sum(there in count for count in counts) > 1
        }
        if self.sums_apart:
            seen = len(self.graph.roots)
            shared |= {
                there
                for there, count in total.items()
                if 1 < count <= MOST_APART and not (there.is_boundary and there.index >= seen)
            }
        return [_numbered(region, shared) for region in regions]

    def _steps(self, regions: Sequence[RegionNodes]) -> list[BackwardStep]:
        """The steps in order. A region runs as late as possible: just before the user can see something of
        it, which is a hook on a visible tensor or a complete gradient."""
        home = {node: number for number, region in enumerate(regions) for node in region.nodes}
        boundary_home = [home[edge.node] for edge in self.boundaries]
        needs: dict[int | Destination, list[int]] = {}
        for number, region in enumerate(regions):
            for there in region.destinations:
                key = boundary_home[there.index] if there.is_boundary else Destination(there.index)
                needs.setdefault(key, []).append(number)
        for before, after in self._turns(regions) if self.takes_turns else ():
            needs.setdefault(after, []).append(before)
        steps: dict[BackwardStep, None] = {}

        def run(number: int) -> None:
            if BackwardStep(number) not in steps:
                for before in needs.get(number, ()):
                    run(before)
                steps[BackwardStep(number)] = None

        roots = {edge.node for edge in self.graph.roots}
        for node in self.order:
            if node in self.primals:
                for number in needs[Destination(self.primals[node])]:
                    run(number)
                steps[BackwardStep(self.primals[node], True)] = None
            elif node in roots:
                run(home[node])
        return list(steps)

    def _turns(self, regions: Sequence[RegionNodes]) -> Iterator[tuple[int, int]]:
        """Regions that contribute to one sum, one after the other."""
        givers: dict[Destination, list[int]] = {}
        for number, region in enumerate(regions):
            for there in region.sends.values():
                givers.setdefault(replace(there, number=0), []).append(number)
        for there, numbers in givers.items():
            if len(numbers) > (2 if there.is_boundary and there.index >= len(self.graph.roots) else 1):
                yield from pairwise(dict.fromkeys(numbers))


def _numbered(region: RegionNodes, shared: Collection[Destination]) -> RegionNodes:
    if not any(there in shared for there in region.destinations):
        return region
    seen = Counter[Destination]()
    sends = {}
    for place, there in region.sends.items():
        sends[place] = replace(there, number=seen[there]) if there in shared else there
        seen[there] += 1
    return replace(region, destinations=tuple(dict.fromkeys(sends.values())), sends=sends)


#: most cuts that are made: each costs a node and a call.
MOST_BLOCKS = 32


def cut_between_contributions(
    graph: LiveGraph, primals: Mapping[int, int], order: Sequence[int], region_of: Mapping[int, Hashable]
) -> dict[int, Hashable] | None:
    """For each node that does not accumulate: its region, and the number of its block. None if there would be
    too many blocks.

    A sum of three or more has eager's bits only if it is made in eager's order; something from outside may be
    added to what arrives at visible tensors and primals. So where one region contributes to a sum after
    another, both are cut, and all others too: what eager runs before the cut then runs before what it runs
    after it.
    """
    seen = set(graph.roots)
    givers: dict[Edge, list[int]] = {}
    for node in order:
        for edge in () if node in primals else graph.nodes[node].edges:
            if edge is not None:
                givers.setdefault(edge, []).append(node)
    sums = [
        nodes
        for edge, nodes in givers.items()
        if len(nodes) > (1 if edge in seen or edge.node in primals else 2)
    ]
    cuts = {
        after for nodes in sums for before, after in pairwise(nodes) if region_of[before] != region_of[after]
    }
    blocks: dict[int, Hashable] = {}
    number = 0
    for node in order:
        number += node in cuts
        if node not in primals:
            blocks[node] = (region_of[node], number)
    return blocks if len(set(blocks.values())) <= MOST_REGIONS else None


def cut_into_blocks(
    graph: LiveGraph,
    primals: Mapping[int, int],
    order: Sequence[int],
    region_of: Mapping[int, Hashable],
    hooked_leaves: Collection[int],
) -> dict[int, Hashable]:
    """For each node that does not accumulate: its region and the number of its block."""
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
    """Places among `nodes` after which to cut, in order. These are the nodes that complete the gradient of a
    hooked leaf. The last node is left out, and so is every place where a cut would change the order of a sum.

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
