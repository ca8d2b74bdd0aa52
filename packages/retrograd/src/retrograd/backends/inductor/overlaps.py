"""Prevents in-place writes by Inductor that give wrong results.

Such a write is wrong if the memory shows one element at several indices, of which only one should change. It
is also wrong if a view of the memory was written just before: code that fills by a mask then reads the
values from before that write.

In: a graph after Inductor's joint passes. Out: the same graph, with copies, and with other calls in place of
such fills.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from retrograd.facts import fact
from retrograd.runtime.tensor import has_overlaps

aten = torch.ops.aten


def part_overlaps(graph: fx.Graph) -> list[fx.Node]:
    """Prevent such writes. Returns the new calls, in order."""
    new: list[fx.Node] = []
    for node in [one for one in graph.nodes if fact("reinplaced", one.target) == "index"]:
        given: Any = node.args[0]
        with graph.inserting_before(node):
            if has_overlaps(given.meta["val"]):
                new.append(graph.call_function(aten.clone.default, (given,)))
                node.update_arg(0, new[-1])
            elif fact("reinplaced", given.target) == "view" and _is_fill(node):
                new += _fill(graph, node)
    return new


def _is_fill(node: fx.Node) -> bool:
    """Whether the call writes one element wherever a mask is true."""
    given: Any = node.args
    _, indices, value, *_ = given
    if node.kwargs or len(indices) != 1 or value.meta["val"].numel() != 1:
        return False
    return bool(indices[0].meta["val"].dtype is torch.bool)


def _fill(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Replace a fill by ``aten.where``."""
    arguments: Any = node.args
    given, (mask,), value, *accumulates = arguments
    new = [graph.call_function(aten.reshape.default, (value, []))]
    if accumulates == [True]:
        new.append(graph.call_function(aten.add.Tensor, (given, new[-1])))
    replacement = new[-1]
    for _ in range(given.meta["val"].dim() - mask.meta["val"].dim()):
        mask = graph.call_function(aten.unsqueeze.default, (mask, -1))
        new.append(mask)
    new.append(graph.call_function(aten.where.self, (mask, replacement, given)))
    node.replace_all_uses_with(new[-1])
    graph.erase_node(node)
    return new
