"""Tools for scenarios that look at the autograd graph itself.

In: a probe and tensors whose graph is to be watched. Out: the node behind a tensor, the nodes below a root
in a fixed order, and hooks on all of them, so that a scenario observes the whole order of one backward.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradparity.probe import Probe


def node_of(tensor: Tensor) -> Node:
    """Return the autograd node that produces ``tensor``; for a leaf, its AccumulateGrad node."""
    return get_gradient_edge(tensor).node


def nodes_below(root: Tensor) -> list[Node]:
    """Return every node reachable from ``root``, depth first, each once, in the order of its edges."""
    found: list[Node] = []
    stack = [node_of(root)]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.append(node)
        stack.extend(child for child, _ in reversed(node.next_functions) if child is not None)
    return found


def hook_every_node(p: Probe, root: Tensor, *, post: bool = False) -> None:
    """Put a recording pre hook (or post hook) on every node below ``root``; the site is ``position:name``."""
    for position, node in enumerate(nodes_below(root)):
        site = f"{position}:{node.name()}"
        if post:
            node.register_hook(p.hook(site, kind="node_post"))
        else:
            node.register_prehook(p.hook(site, kind="node_pre"))
