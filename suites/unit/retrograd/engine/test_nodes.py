"""Nodes made by `add_call`, `add_placeholder` and `add_copy` are those that FX itself would have made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from retrograd.graph.fx import add_call, add_copy, add_placeholder, copied
from retrograd.live.calls.gradients import NodeFunction


def by_fx(graph: fx.Graph) -> Callable[..., fx.Node]:
    return lambda *args: graph.create_node("call_function", *args)


def by_us(graph: fx.Graph) -> Callable[..., fx.Node]:
    return lambda *args: add_call(graph, *args)


def written(call_in: Callable[[fx.Graph], Callable[..., fx.Node]]) -> fx.Graph:
    """Calls with and without keywords and names, one of them ahead of others, and one taken out again."""
    graph = fx.Graph()
    call = call_in(graph)
    x = graph.placeholder("x")
    node = NodeFunction("MulBackward0", operator.mul)
    parts = call(node, ([x, None], (True, 1.5), [x, [x]]))
    first, second = call(operator.getitem, (parts, 0)), call(operator.getitem, (parts, 1))
    total = call(torch.add, (first, second), {"alpha": 2})
    with graph.inserting_before(first):
        call(node, ([x],))
    named = [call(torch.add, (total, x), None, name) for name in ("kept_3", "kept_3", "2 parts", "kept")]
    graph.erase_node(named[1])
    graph.output((call(operator.getitem, (total, 0)), None))
    return graph


def described(graph: fx.Graph) -> list[Any]:
    return [
        (node.op, node.name, node.target, str(node.args), str(node.kwargs), [*map(str, node.users)])
        for node in graph.nodes
    ]


def without_objects(rows: list[Any]) -> list[Any]:
    return [(op, name, getattr(target, "__name__", target), *rest) for op, name, target, *rest in rows]


def test_calls_are_those_that_fx_would_have_made() -> None:
    ours, its = written(by_us), written(by_fx)
    assert without_objects(described(ours)) == without_objects(described(its))
    assert len(ours.nodes) == len(its.nodes)
    getitems = [node.name for node in ours.find_nodes(op="call_function", target=operator.getitem)]
    assert getitems == ["getitem", "getitem_1", "getitem_2"]
    ours.lint()


def test_containers_in_arguments_cannot_be_changed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = add_call(graph, torch.add, ([x],), {"out": [x]})
    with pytest.raises((TypeError, NotImplementedError)):
        node.args[0].append(x)
    with pytest.raises((TypeError, NotImplementedError)):
        add_call(graph, torch.add, (x,)).kwargs["out"] = x  # type: ignore[index]


def test_placeholders_stand_where_the_graph_inserts() -> None:
    graph = fx.Graph()
    first = graph.placeholder("input_0")
    add_call(graph, torch.sin, (first,))
    with graph.inserting_after(first):
        second = add_placeholder(graph, "input_1")
    assert [node.name for node in graph.nodes] == ["input_0", "input_1", "sin"]
    assert (second.op, second.target) == ("placeholder", "input_1")


def both_copies(graph: fx.Graph) -> Iterator[fx.Graph]:
    for add in (add_copy, lambda copy, node, value_of: copy.node_copy(node, value_of)):
        copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.nodes:
            made[node] = add(copy, node, made.__getitem__)
        yield copy


def test_copies_are_those_that_fx_would_have_made() -> None:
    graph = written(by_fx)
    for i, node in enumerate(graph.nodes):
        node.meta["number"] = [i]
    ours, its = both_copies(graph)
    assert described(ours) == described(its) == described(graph)
    for mine, node in zip(ours.nodes, graph.nodes, strict=True):
        assert mine.meta == node.meta
        assert mine.meta is not node.meta
        assert mine.graph is ours


def test_a_copied_graph_computes_the_same() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, x), {"alpha": 3}),))
    copy = copied(graph)
    next(iter(graph.nodes)).meta["changed"] = True
    assert next(iter(copy.nodes)).meta == {}
    (result,) = fx.GraphModule({}, copy)(torch.tensor(2.0))
    assert result.item() == 8.0
