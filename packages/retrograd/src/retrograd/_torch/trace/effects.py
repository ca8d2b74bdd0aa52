"""Calls with effects, as they stand in a trace: chained by tokens.

In: a traced graph. Out: the same with plain calls in their place, in their order, and no tokens.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._higher_order_ops.effects import with_effects


def without_tokens(graph: fx.Graph) -> None:
    """Change `graph` in place."""
    tokens = set[fx.Node]()
    for node in list(graph.nodes):
        if node.target is with_effects:
            tokens.add(node.args[0])
            _unwrapped(graph, node, tokens)
    for token in reversed([node for node in graph.nodes if node in tokens]):
        if not token.users:
            graph.erase_node(token)


def _unwrapped(graph: fx.Graph, node: fx.Node, tokens: set[fx.Node]) -> None:
    """Put the call in place of ``with_effects(token, operator, ...)``, which gives (token, *results)."""
    target = node.args[1]
    assert isinstance(target, torch._ops.OpOverload)
    with graph.inserting_before(node):
        call = graph.call_function(target, node.args[2:], node.kwargs)
        call.meta = {**node.meta, "val": node.meta["val"][1:] if "val" in node.meta else None}
    several = len(target._schema.returns) > 1
    for user in list(node.users):
        place = user.args[1]
        if user.target is not operator.getitem or not isinstance(place, int):
            continue
        if place == 0:
            for later in list(user.users):
                later.replace_input_with(user, node.args[0])  # type: ignore[arg-type]
        elif several:
            user.args = (call, place - 1)
            continue
        else:
            call.meta["val"] = user.meta.get("val")
            user.replace_all_uses_with(call)
        graph.erase_node(user)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
