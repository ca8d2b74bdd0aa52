"""Divide eager's autograd graph into regions, and put them in eager's order.

In: the autograd graph above a function's primals. Out: a `Structure`: boundaries, regions with their nodes,
and the order of a complete backward.

Two nodes belong to the same region if the same visible tensors reach them without passing another visible
tensor. So a backward reaches all nodes of a region or none, whichever outputs the loss depends on. An edge
from one region into another is a boundary. (No two regions wait for each other: an edge that is no visible
boundary leads to nodes that as many roots reach, or more.)

If hooks free each leaf's gradient as soon as it has accumulated (an optimizer in backward), eager holds few
gradients at a time, while a region returns all its gradients at once. Regions may therefore be cut into
blocks, each of which ends with a node that completes the gradient of such a leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType

from retrograd.graph.eager_order import ROOT, Edge, LiveGraph, eager_walk, with_steps
from retrograd.graph.joint import BackwardStep, Destination
from retrograd.graph.joint_graph import CaptureOptions

#: with more regions than this, we differentiate all outputs together.
MOST_REGIONS = 64
#: if a graph makes more contributions to a gradient than this, it sums them itself, because separate
#: contributions occupy memory until the region ends.
MOST_SEPARATE_SUMS = 32
#: the most cuts that we make: each costs an autograd node and a call.
MOST_BLOCKS = 32


@dataclass(frozen=True)
class RegionNodes:
    """One region of the autograd graph.

    Attributes:
        nodes: the region's nodes, in the order in which eager runs them.
        roots: the numbers of the boundaries at which cotangents enter.
        sends: by node and number of its edge, the destination of each gradient that leaves the region.
        is_merged: whether it stands for more than `MOST_REGIONS`. A cotangent without a gradient then leaves
            gradients undefined that the region would give zeros.
    """

    nodes: tuple[int, ...]
    roots: tuple[int, ...]
    sends: Mapping[tuple[int, int], Destination]
    is_merged: bool = False

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """Where the region's gradients go."""
        return tuple(dict.fromkeys(self.sends.values()))


@dataclass(frozen=True)
class Structure:
    """Eager's autograd graph, divided.

    Attributes:
        boundaries: the edge of each boundary; the visible ones come first, in the order of the graph's roots.
        regions: the regions, in the order in which they run.
        order: eager's steps if every visible boundary gets a cotangent.
    """

    boundaries: tuple[Edge, ...]
    regions: tuple[RegionNodes, ...]
    order: tuple[BackwardStep, ...]


def divide(
    graph: LiveGraph,
    primals: Mapping[int, int],
    options: CaptureOptions,
    leaves: Collection[int] = (),
    steps: Mapping[int, Sequence[Sequence[int]]] = MappingProxyType({}),
) -> Structure:
    """Divide `graph`, whose roots are the edges of the visible tensors.

    Args:
        graph: the autograd graph.
        primals: for each node that accumulates a gradient, the primal that receives it.
        options: how to divide.
        leaves: the primals whose gradients hooks may have to see one by one.
        steps: for each node that stands for several of eager's nodes, the edges of each of those.
    """
    stepwise, _ = with_steps(graph, steps)
    order = [node for node in eager_walk(stepwise) if node != ROOT and node < len(graph.nodes)]
    return _RegionDivision(graph, primals, options, leaves, order).structure()


class _RegionDivision:
    """Divides one graph.

    Regions have arbitrary hashable names until they are numbered.
    """

    def __init__(
        self,
        graph: LiveGraph,
        primals: Mapping[int, int],
        options: CaptureOptions,
        leaves: Collection[int],
        order: Sequence[int],
    ) -> None:
        self._graph, self._primals, self._options, self._leaves = graph, primals, options, leaves
        self._order, self._nodes = order, [node for node in order if node not in primals]
        self._seen = len(graph.roots)
        self._boundaries = {edge: number for number, edge in enumerate(graph.roots)}
        self._borders = frozenset(graph.roots)
        self._region_of = self._reached_by()
        self._is_merged = not options.single_region and len(set(self._region_of.values())) > MOST_REGIONS
        if options.single_region or self._is_merged:
            self._borders, self._region_of = frozenset(), dict.fromkeys(self._nodes)
        if options.split_at_leaf_grads:
            self._region_of = self._cut_into_blocks()
        blocks = self._cut_between_contributions() if options.separate_sums else None
        #: whether regions that contribute to the same sum must run in eager's order.
        self._takes_turns = blocks is not None
        self._region_of = blocks or self._region_of
        self._leading = self._leading_to_primals()

    def structure(self) -> Structure:
        """The divided graph."""
        members: dict[Hashable, list[int]] = {}
        for node in self._nodes:
            members.setdefault(self._region_of[node], []).append(node)
            for edge in self._crossing(node):
                self._boundaries.setdefault(edge, len(self._boundaries))
        regions = self._separate([self._region(nodes) for nodes in members.values()])
        steps = self._steps(regions)
        run = [step.index for step in steps if not step.is_leaf]
        place = {number: i for i, number in enumerate(run)}  # We number regions in the order they run.
        order = tuple(step if step.is_leaf else BackwardStep(place[step.index]) for step in steps)
        return Structure(tuple(self._boundaries), tuple(regions[number] for number in run), order)

    def _edges(self, node: int) -> list[Edge]:
        return [edge for edge in self._graph.nodes[node].edges if edge is not None]

    def _contributors(self, nodes: Iterable[int]) -> dict[Edge, list[int]]:
        """By edge, the nodes that contribute to the gradient there, in order. A node with two contributions
        is listed twice."""
        found: dict[Edge, list[int]] = {}
        for node in nodes:
            for edge in self._edges(node):
                found.setdefault(edge, []).append(node)
        return found

    # which nodes share a region

    def _reached_by(self) -> dict[int, Hashable]:
        """For each node, the visible tensors that reach it."""
        reached: dict[int, set[int]] = {}
        for edge, boundary in self._boundaries.items():
            reached.setdefault(edge.node, set()).add(boundary)
        for node in self._nodes:
            for edge in self._edges(node):
                if edge not in self._borders and edge.node not in self._primals:
                    reached.setdefault(edge.node, set()).update(reached[node])
        return {node: frozenset(roots) for node, roots in reached.items()}

    def _cut_between_contributions(self) -> dict[int, Hashable] | None:
        """For each node, its region and the number of its block. None if there would be too many blocks.

        A sum of three or more contributions is bitwise equal to eager's only if we add them in eager's order.
        At visible tensors and primals, contributions from outside the graph may be added too. So if one
        region contributes to a sum after another, we cut every region at that point: whatever eager runs
        before the cut then runs before whatever it runs after the cut. Nodes of one region that eager runs
        one after another are not cut apart: the cut comes before the first of them.
        """
        region_of, cuts = self._region_of, set[int]()
        first: dict[int, int] = {}
        for _, row in groupby(self._order, region_of.get):
            first |= dict.fromkeys(nodes := list(row), nodes[0])
        for edge, nodes in self._contributors(self._nodes).items():
            is_open = edge in self._boundaries or edge.node in self._primals
            if len(nodes) > (1 if is_open else 2):
                pairs = pairwise(nodes)
                cuts |= {first[after] for before, after in pairs if region_of[before] != region_of[after]}
        numbers = accumulate(node in cuts for node in self._order)
        block = dict(zip(self._order, numbers, strict=True))
        blocks: dict[int, Hashable] = {node: (region_of[node], block[node]) for node in self._nodes}
        return blocks if len(set(blocks.values())) <= MOST_REGIONS else None

    def _cut_into_blocks(self) -> dict[int, Hashable]:
        """For each node, its region and the number of its block."""
        members: dict[Hashable, list[int]] = {}
        for node in self._nodes:
            members.setdefault(self._region_of[node], []).append(node)
        cuts = {region: self._cuts(nodes) for region, nodes in members.items()}
        every = -(-sum(map(len, cuts.values())) // MOST_BLOCKS) or 1
        blocks: dict[int, Hashable] = {}
        for region, nodes in members.items():
            chosen, block = set(cuts[region][every - 1 :: every]), 0
            for place, node in enumerate(nodes):
                blocks[node] = (region, block)
                block += place in chosen
        return blocks

    def _cuts(self, nodes: Sequence[int]) -> list[int]:
        """Positions among a region's `nodes` after which to cut, in order.

        We cut after each node that completes the gradient of one of the leaves, except the last node, and
        except where a cut would change the order of a sum. A block sums its own contributions to an edge
        before anything else is added to them. That is eager's order if only one contribution to that edge
        comes after the cut.
        """
        place = {node: i for i, node in enumerate(nodes)}
        given = {edge: [place[one] for one in by] for edge, by in self._contributors(nodes).items()}
        completed = {
            places[-1] for edge, places in given.items() if self._primals.get(edge.node) in self._leaves
        }
        sums = [(places[0], places[-2]) for places in given.values() if len(places) > 2]
        return [
            place
            for place in sorted(completed)
            if place < len(nodes) - 1 and not any(first <= place < last for first, last in sums)
        ]

    # edges between regions

    def _leading_to_primals(self) -> set[int]:
        """The nodes from which a gradient reaches a primal. The others differentiate a view made under
        `no_grad`."""
        found: set[int] = set()
        for node in reversed(self._nodes):
            if any(edge.node in self._primals or edge.node in found for edge in self._edges(node)):
                found.add(node)
        return found

    def _crossing(self, node: int) -> list[Edge]:
        """The node's edges that lead to a primal through another region."""
        own = self._region_of[node]
        return [
            edge
            for edge in self._edges(node)
            if edge.node in self._leading and (edge in self._borders or self._region_of[edge.node] != own)
        ]

    def _region(self, nodes: list[int]) -> RegionNodes:
        inside = set(nodes)
        roots = [number for edge, number in self._boundaries.items() if edge.node in inside]
        sends: dict[tuple[int, int], Destination] = {}
        for node in nodes:
            crossing = set(self._crossing(node))
            for place, edge in enumerate(self._graph.nodes[node].edges):
                if edge in crossing:
                    sends[node, place] = Destination(self._boundaries[edge], True)
                elif edge is not None and edge.node in self._primals:
                    sends[node, place] = Destination(self._primals[edge.node])
        return RegionNodes(tuple(nodes), tuple(roots), sends, self._is_merged)

    def _is_hidden(self, there: Destination) -> bool:
        """Whether nothing outside the graph can add to the gradient at this destination."""
        return there.is_boundary and there.index >= self._seen

    def _separate(self, regions: Sequence[RegionNodes]) -> list[RegionNodes]:
        """Number the contributions to a gradient, so that regions do not sum them, if there are three or more
        from several regions. With `separate_sums`, two or more suffice, even from one region, if something
        outside the function may add to that gradient."""
        counts = [Counter(region.sends.values()) for region in regions]
        total = sum(counts, Counter[Destination]())
        shared = {
            there
            for there, count in total.items()
            if (count > 2 and sum(there in one for one in counts) > 1)
            or (
                self._options.separate_sums and 1 < count <= MOST_SEPARATE_SUMS and not self._is_hidden(there)
            )
        }
        return [_numbered(region, shared) for region in regions]

    # the order

    def _steps(self, regions: Sequence[RegionNodes]) -> list[BackwardStep]:
        """The steps in order. A region runs as late as possible: just before the user can observe a result of
        it, in a hook on a visible tensor or in a complete gradient."""
        home = {node: number for number, region in enumerate(regions) for node in region.nodes}
        boundary_home = [home[edge.node] for edge in self._boundaries]
        needs: dict[int | Destination, list[int]] = {}
        for number, region in enumerate(regions):
            for there in region.destinations:
                key = boundary_home[there.index] if there.is_boundary else Destination(there.index)
                needs.setdefault(key, []).append(number)
        for before, after in self._turns(regions) if self._takes_turns else ():
            needs.setdefault(after, []).append(before)
        steps: dict[BackwardStep, None] = {}

        def run(number: int) -> None:
            if BackwardStep(number) not in steps:
                for before in needs.get(number, ()):
                    run(before)
                steps[BackwardStep(number)] = None

        roots = {edge.node for edge in self._graph.roots}
        for node in self._order:
            if node in self._primals:
                for number in needs[Destination(self._primals[node])]:
                    run(number)
                steps[BackwardStep(self._primals[node], True)] = None
            elif node in roots:
                run(home[node])
        return list(steps)

    def _turns(self, regions: Sequence[RegionNodes]) -> Iterator[tuple[int, int]]:
        """Pairs of regions that contribute to the same sum, of which the first must run first."""
        givers: dict[Destination, list[int]] = {}
        for number, region in enumerate(regions):
            for there in region.sends.values():
                givers.setdefault(replace(there, number=0), []).append(number)
        for there, numbers in givers.items():
            if len(numbers) > (2 if self._is_hidden(there) else 1):
                yield from pairwise(dict.fromkeys(numbers))


def _numbered(region: RegionNodes, shared: Collection[Destination]) -> RegionNodes:
    """The region with its contributions to the destinations in `shared` numbered."""
    seen = Counter[Destination]()
    sends = {}
    for place, there in region.sends.items():
        sends[place] = replace(there, number=seen[there]) if there in shared else there
        seen[there] += 1
    return replace(region, sends=sends)
