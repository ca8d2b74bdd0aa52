"""Draw random numbers as eager's in-place operators do.

In: the graph of a step, to be interpreted. Out: a graph in which what eager fills in place is filled in
place: where memory is not laid out in the order of the indices, the functional operator would give every
number another place.
"""

from __future__ import annotations

import torch
from torch import fx

from retrograd._torch.boxed import copied
from retrograd._torch.operators import is_random, operator_in_place

__all__ = ["draw_in_place"]


def draw_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`, or a copy that fills in place."""
    if not any(map(_is_filled, gm.graph.nodes)):
        return gm
    made = fx.GraphModule(gm, copied(gm.graph))
    for node in list(made.graph.nodes):
        if _is_filled(node):
            with made.graph.inserting_before(node):
                memory = made.graph.call_function(torch.ops.aten.clone.default, (node.args[0],))
            node.args = (memory, *node.args[1:])
            node.target = operator_in_place(node.target)
    made.recompile()
    return made


def _is_filled(node: fx.Node) -> bool:
    if not node.meta.get("draws_in_place") or not is_random(node) or operator_in_place(node.target) is None:
        return False
    first = node.args[0]
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    return isinstance(value, torch.Tensor) and not value.is_contiguous()
