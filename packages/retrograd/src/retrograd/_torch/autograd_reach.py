"""Which nodes of the autograd graph hang behind a tensor.

In: tensors or gradient edges. Out: nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.autograd.graph import GradientEdge

__all__ = ["nodes_behind"]


def nodes_behind(roots: Iterable[Any]) -> set[Any]:
    """All nodes that a backward from `roots` may reach."""
    stack = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    found: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(next_node for next_node, _ in node.next_functions)
    return found
