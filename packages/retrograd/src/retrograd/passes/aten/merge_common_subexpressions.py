"""Make only one of several calls that give the same value.

In: a joint graph. Out: the same, where a call equal to an earlier one is replaced by it.

Not merged:

- calls with an effect, random calls, uninitialised memory, operators of higher order;
- calls on different sides of a write to a primal;
- values that share memory with an output: two equal outputs, or gradients, have to be two tensors, and if the
  user changes an output the backward must not see it;
- calls that a policy marked differently for recomputation.

A call in the backward of a region depends on a cotangent of that region. So it never equals a call of the
forward or of another region.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import is_mutating, is_repeatable
from retrograd.graph.structure import frozen_arguments
from retrograd.passes.aten.edit import nodes_seen_outside


def merge_common_subexpressions(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Merge equal calls of `gm`, in place."""
    seen_outside = nodes_seen_outside(gm.graph)
    first: dict[Hashable, fx.Node] = {}
    writes = 0
    for node in list(gm.graph.nodes):
        writes += is_mutating(node)
        if node in seen_outside or not is_repeatable(node):
            continue
        operands: list[fx.Node] = []
        arguments = frozen_arguments((node.args, dict(sorted(node.kwargs.items()))), operands)
        key = node.target, arguments, tuple(operands), node.meta.get("recompute"), writes
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)
    return gm
