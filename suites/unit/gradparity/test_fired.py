"""Counting graph passes: those that changed a graph, and only while somebody looks."""

import torch
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from gradparity.fired import counting


def graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(lambda x: (x.sin(), x.cos())[0])


def drop_dead(made: torch.fx.GraphModule) -> None:
    made.graph.eliminate_dead_code()


def test_a_pass_counts_if_it_changed_something() -> None:
    made = graph()
    with counting() as counts:
        for _ in range(2):
            GraphTransformObserver(made, "dead").apply_gm_pass(drop_dead)
        GraphTransformObserver(made, "nothing").apply_gm_pass(lambda module: None)
    assert counts == {"dead": 1}
    GraphTransformObserver(graph(), "dead").apply_gm_pass(drop_dead)
    assert counts == {"dead": 1}


def test_the_observer_is_put_back() -> None:
    before = GraphTransformObserver.__enter__
    with counting():
        assert GraphTransformObserver.__enter__ is not before
    assert GraphTransformObserver.__enter__ is before
