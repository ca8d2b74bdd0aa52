"""Eager's autograd graph, divided: regions, boundaries, order; for graphs written by hand."""

from __future__ import annotations

import random

import pytest

from retrograd.aot.trace.structure import MOST_REGIONS, RegionNodes, Structure, divide
from retrograd.graph.eager_order import ROOT, Edge, LiveGraph, LiveNode, eager_walk
from retrograd.graph.joint import BackwardStep, Destination
from retrograd.graph.joint_graph import CaptureOptions

LEAF = 2**64 - 1


def graph(*nodes: tuple[str, int, list[int]], roots: list[int]) -> LiveGraph:
    """Nodes as (name, sequence number, successors)."""
    live = [LiveNode(name, name, seq, tuple(Edge(i, 0) for i in edges)) for name, seq, edges in nodes]
    return LiveGraph(tuple(live), tuple(Edge(i, 0) for i in roots), None)


def leaves_of(live: LiveGraph) -> dict[int, int]:
    """Leaves are primals 0, 1, … in the order in which they stand."""
    return {node: i for i, node in enumerate(n for n, v in enumerate(live.nodes) if v.sequence == LEAF)}


def divided(live: LiveGraph, single: bool = False, separate_sums: bool = False) -> Structure:
    return divide(live, leaves_of(live), CaptureOptions(single, separate_sums=separate_sums))


def text(structure: Structure) -> list[str]:
    """One line for each region, then the order: ``2`` runs region 2, ``p0`` completes primal 0."""
    regions = [
        f"{region.nodes} of {region.roots} to "
        + " ".join(("j" if there.is_boundary else "p") + str(there.index) for there in region.destinations)
        for region in structure.regions
    ]
    return [*regions, " ".join(("p" if step.is_leaf else "") + str(step.index) for step in structure.order)]


CHAIN = graph(("sum", 2, [1]), ("mul", 1, [2]), ("x", LEAF, []), roots=[0])
INDEPENDENT = graph(("sin", 1, [2]), ("exp", 2, [3]), ("x", LEAF, []), ("y", LEAF, []), roots=[0, 1])
INTERMEDIATE = graph(("sin", 2, [1]), ("mul", 1, [2]), ("x", LEAF, []), roots=[0, 1])
MEETING = graph(("sin", 2, [2]), ("exp", 3, [2]), ("mul", 1, [3]), ("x", LEAF, []), roots=[0, 1])
SHARED_LEAF = graph(("sin", 1, [2]), ("exp", 2, [2]), ("x", LEAF, []), roots=[0, 1])
#: y = (x * a) + (x * b): the leaves a and b become ready one after the other
LEAVES_IN_TURN = graph(
    ("add", 5, [1, 2]), ("mul_a", 3, [3, 4]), ("mul_b", 4, [3, 5]),
    ("x", LEAF, []), ("a", LEAF, []), ("b", LEAF, []), roots=[0],
)  # fmt: skip
#: three outputs: one of a alone, one of b alone, one of both, over a and b that are hidden
THREE = graph(
    ("of_a", 3, [3]), ("of_b", 4, [4]), ("of_both", 5, [3, 4]),
    ("a", 1, [5]), ("b", 2, [6]), ("x", LEAF, []), ("y", LEAF, []), roots=[0, 1, 2],
)  # fmt: skip


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        pytest.param(CHAIN, ["(0, 1) of (0,) to p0", "0 p0"], id="one output is one region"),
        pytest.param(
            INDEPENDENT,
            ["(1,) of (1,) to p1", "(0,) of (0,) to p0", "0 p1 1 p0"],
            id="outputs that share nothing: what was built last runs first",
        ),
        pytest.param(
            INTERMEDIATE,
            ["(0,) of (0,) to j1", "(1,) of (1,) to p0", "0 1 p0"],
            id="a border runs through an intermediate that is returned",
        ),
        pytest.param(
            MEETING,
            ["(1,) of (1,) to j2", "(0,) of (0,) to j2", "(2,) of (2,) to p0", "0 1 2 p0"],
            id="a hidden boundary where two outputs meet",
        ),
        pytest.param(
            SHARED_LEAF,
            ["(1,) of (1,) to p0", "(0,) of (0,) to p0", "0 1 p0"],
            id="a leaf waits for all regions",
        ),
        pytest.param(
            LEAVES_IN_TURN,
            ["(0, 2, 1) of (0,) to p0 p2 p1", "0 p2 p0 p1"],
            id="leaves in the order in which they become ready",
        ),
        pytest.param(
            THREE,
            [
                "(2,) of (2,) to j3 j4",
                "(1,) of (1,) to j4",
                "(0,) of (0,) to j3",
                "(4,) of (4,) to p1",
                "(3,) of (3,) to p0",
                "0 1 2 3 p1 4 p0",
            ],
            id="a region runs just before what a user can see of it",
        ),
    ],
)
def test_regions_and_order(live: LiveGraph, expected: list[str]) -> None:
    assert text(divided(live)) == expected


def test_visible_boundaries_come_first_as_given() -> None:
    assert divided(MEETING).boundaries == (Edge(0, 0), Edge(1, 0), Edge(2, 0))
    assert divided(INTERMEDIATE).boundaries == (Edge(0, 0), Edge(1, 0))


def test_two_outputs_of_one_node_are_one_region() -> None:
    nodes = (LiveNode("unbind", "unbind", 1, (Edge(1, 0),)), LiveNode("x", "x", LEAF, ()))
    structure = divide(LiveGraph(nodes, (Edge(0, 0), Edge(0, 1)), None), {1: 0}, CaptureOptions())
    assert structure.regions == (RegionNodes((0,), (0, 1), {(0, 0): Destination(0)}),)
    assert structure.order == (BackwardStep(0), BackwardStep(0, True))


def test_all_outputs_together_if_asked() -> None:
    structure = divided(MEETING, single=True)
    assert text(structure) == ["(1, 0, 2) of (0, 1) to p0", "0 p0"]
    assert structure.boundaries == (Edge(0, 0), Edge(1, 0))


@pytest.mark.parametrize(("count", "expected"), [(MOST_REGIONS, MOST_REGIONS), (MOST_REGIONS + 1, 1)])
def test_more_regions_than_allowed_become_one(count: int, expected: int) -> None:
    nodes = [("out", i, [count]) for i in range(count)]
    structure = divided(graph(*nodes, ("x", LEAF, []), roots=list(range(count))))
    assert len(structure.regions) == expected


def random_graph(seed: int) -> LiveGraph:
    """A graph as autograd builds them: later nodes point to earlier ones; some are visible."""
    rng = random.Random(seed)
    leaves, calls = rng.randint(1, 4), rng.randint(1, 12)
    nodes = []
    for i in range(calls):  # i counts from the last call backward
        below = [*range(i + 1, calls), *range(calls, calls + leaves)]
        nodes.append((f"call{i}", calls - i, rng.sample(below, min(len(below), rng.randint(1, 3)))))
    roots = [0, *sorted(rng.sample(range(1, calls), rng.randint(0, min(4, calls - 1))))]
    everything = graph(*nodes, *[("leaf", LEAF, [])] * leaves, roots=roots)
    return reachable(everything)


def reachable(live: LiveGraph) -> LiveGraph:
    """Only what the roots reach, as the graph of a function holds it."""
    order = [edge.node for edge in live.roots]
    for node in order:  # grows while it is read
        order += [e.node for e in live.nodes[node].edges if e is not None and e.node not in order]
    number = {node: i for i, node in enumerate(dict.fromkeys(order))}

    def moved(edge: Edge | None) -> Edge | None:
        return None if edge is None else Edge(number[edge.node], edge.slot)

    nodes = [
        LiveNode(old.handle, old.name, old.sequence, tuple(map(moved, old.edges)))
        for old in (live.nodes[node] for node in number)
    ]
    return LiveGraph(tuple(nodes), tuple(moved(root) for root in live.roots), None)  # type: ignore[misc]


@pytest.mark.parametrize("separate_sums", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_laws_of_a_division(seed: int, separate_sums: bool) -> None:
    live = random_graph(seed)
    structure, primals = divided(live, separate_sums=separate_sums), leaves_of(live)
    calls = [node for node in range(len(live.nodes)) if node not in primals]
    assert sorted(n for region in structure.regions for n in region.nodes) == calls
    ran = {step.index: place for place, step in enumerate(structure.order) if not step.is_leaf}
    complete = {step.index: place for place, step in enumerate(structure.order) if step.is_leaf}
    assert list(ran) == list(range(len(structure.regions)))
    home = {root: number for number, region in enumerate(structure.regions) for root in region.roots}
    for number, region in enumerate(structure.regions):
        for there in region.destinations:
            if there.is_boundary:
                assert ran[number] < ran[home[there.index]]
            else:
                assert ran[number] < complete[there.index]
    as_eager = [primals[node] for node in eager_walk(live) if node != ROOT and node in primals]
    assert list(complete) == as_eager


@pytest.mark.parametrize("seed", range(100))
def test_sums_are_made_in_eagers_order(seed: int) -> None:
    """What regions give arrives before a region begins, and what it gives to itself comes after that. Two
    terms may change places, if nothing from outside is added to them."""
    live = random_graph(seed)
    structure, primals = divided(live, separate_sums=True), leaves_of(live)
    home = {node: number for number, region in enumerate(structure.regions) for node in region.nodes}
    arrived: dict[Edge, list[tuple[bool, int]]] = {}
    for number, region in enumerate(structure.regions):
        for node in region.nodes:
            for edge in filter(None, live.nodes[node].edges):
                arrived.setdefault(edge, []).append((home.get(edge.node) == number, node))
    walk = [node for node in eager_walk(live) if node != ROOT]
    for edge, terms in arrived.items():
        if len(terms) > (1 if edge in live.roots or edge.node in primals else 2):
            ours = [node for _, node in sorted(terms, key=lambda term: term[0])]
            assert ours == sorted(ours, key=walk.index)
