"""Order a backward graph so that what it computes again is there only as long as it is used.

In: a backward graph, which begins with all that is computed again, as it stands in the joint graph. Out: the
same calls, each of these just before the first call that uses it. Calls with effects stay where they are.
"""

from __future__ import annotations

import operator

from torch import fx

from retrograd._torch.fx import has_effect
from retrograd.aot.trace.aliases import is_backward


def compute_again_late(graph: fx.Graph) -> None:
    """Change the order of `graph` in place."""
    waiting = {
        node: i
        for i, node in enumerate(graph.nodes)
        if node.op == "call_function" and not is_backward(node) and not has_effect(node)
    }
    if not waiting:
        return
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr") or node in waiting:
            continue
        for needed in sorted(_needed_by(node, waiting), key=waiting.__getitem__):
            node.prepend(needed)
            del waiting[needed]


def _needed_by(node: fx.Node, waiting: dict[fx.Node, int]) -> set[fx.Node]:
    """What of `waiting` has to stand before the node; results of one call stay together."""
    found, stack = set[fx.Node](), list(node.all_input_nodes)
    while stack:
        value = stack.pop()
        if value in waiting and value not in found:
            found.add(value)
            stack.extend(value.all_input_nodes)
            stack.extend(user for user in value.users if user.target is operator.getitem)
    return found
