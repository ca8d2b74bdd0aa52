"""The simulated walks against literal orders and against what torch's engine really does."""

from __future__ import annotations

import random

import pytest
import torch

from retrograd.engine.request import EngineRequest, read_live_graph, read_ranks
from retrograd.graph.eager_order import ROOT, Edge, LiveGraph, LiveNode, eager_walk, engine_walk

LEAF = 2**64 - 1


def graph(*nodes: tuple[str, int, list[int]]) -> LiveGraph:
    """Nodes as (name, sequence number, successors); the first is the root."""
    live = [LiveNode(name, name, seq, tuple(Edge(i, 0) for i in edges)) for name, seq, edges in nodes]
    return LiveGraph(tuple(live), (Edge(0, 0),), None)


DIAMOND = graph(("join", 9, [1, 2]), ("early", 3, [3]), ("late", 7, [3]), ("leaf", LEAF, []))


def test_the_engine_walks_last_in_first_out() -> None:
    assert engine_walk(DIAMOND) == [ROOT, 0, 2, 1, 3]


def test_eager_runs_the_largest_sequence_number_first() -> None:
    swapped = graph(("join", 9, [1, 2]), ("late", 7, [3]), ("early", 3, [3]), ("leaf", LEAF, []))
    assert eager_walk(DIAMOND) == [ROOT, 0, 2, 1, 3]
    assert engine_walk(swapped) == [ROOT, 0, 2, 1, 3]
    assert eager_walk(swapped) == [ROOT, 0, 1, 2, 3]


def test_accumulate_grad_runs_as_soon_as_it_is_ready() -> None:
    live = graph(("join", 9, [1, 2]), ("leaf", LEAF, []), ("mul", 8, [3]), ("other", LEAF, []))
    assert eager_walk(live) == [ROOT, 0, 1, 2, 3]
    assert engine_walk(live) == [ROOT, 0, 2, 3, 1]


def test_unwanted_nodes_are_left_out() -> None:
    live = LiveGraph(DIAMOND.nodes, DIAMOND.roots, frozenset({0, 1}))
    assert eager_walk(live) == [ROOT, 0, 1]
    assert engine_walk(live) == [ROOT, 0, 1]


def random_program(seed: int) -> torch.Tensor:
    """A random graph of elementwise nodes over a few leaves, with shared values."""
    draw = random.Random(seed)
    values = [torch.randn(2, requires_grad=True) for _ in range(draw.randint(1, 5))]
    for _ in range(draw.randint(2, 40)):
        one, two = draw.choice(values), draw.choice(values)
        kind = draw.randrange(4)
        values.append((one + two, one * two, one.sin(), torch.stack([one, two]).sum(0))[kind])
    total = values[-1].sum()
    for value in draw.sample(values, min(len(values), 6)):
        total = total + value.sum()
    return total


@pytest.mark.parametrize("seed", range(40))
def test_eager_walk_is_the_order_in_which_torch_runs_the_nodes(seed: int) -> None:
    root = random_program(seed)
    request = EngineRequest((root,), (torch.ones(()),), False, False)
    live = read_live_graph(request)
    ran: list[int] = []
    for index, node in enumerate(live.nodes):
        node.handle.register_prehook(lambda grads, index=index: ran.append(index))
    root.backward()
    assert [ROOT, *ran] == eager_walk(live)


@pytest.mark.parametrize("seed", range(10))
def test_eager_walk_with_inputs_is_the_order_in_which_torch_runs_the_nodes(seed: int) -> None:
    root = random_program(seed)
    leaves: list[torch.Tensor] = []
    everything = read_live_graph(EngineRequest((root,), (torch.ones(()),), False, False))
    leaves = [node.handle.variable for node in everything.nodes if "AccumulateGrad" in node.name]
    chosen = tuple(leaves[:2])
    live = read_live_graph(
        EngineRequest((root,), (torch.ones(()),), False, False, chosen, accumulate_grad=True)
    )
    ran: list[int] = []
    for index, node in enumerate(live.nodes):
        node.handle.register_prehook(lambda grads, index=index: ran.append(index))
    root.backward(inputs=chosen)
    assert [ROOT, *ran] == eager_walk(live)


def test_ranks_tell_orders_of_equal_structure_apart() -> None:
    x = torch.randn(2, requires_grad=True)

    def root(flip: bool) -> torch.Tensor:
        if flip:
            right = x.cos()
            left = x.sin()
        else:
            left = x.sin()
            right = x.cos()
        return (left * right).sum()

    def ranks(flip: bool) -> tuple[int, ...]:
        return read_ranks(EngineRequest((root(flip),), (torch.ones(()),), False, False))

    assert ranks(False) == ranks(False)
    assert ranks(False) != ranks(True)
