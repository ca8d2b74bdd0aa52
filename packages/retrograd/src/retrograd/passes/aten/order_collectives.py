"""Start communication as soon as its input is there, and wait for it when its value is needed.

In: a joint graph with functional collectives. Out: the same calls in another order, with computation between
the start of a collective and its wait. The collectives keep their order among themselves, because all ranks
must agree on it. The other calls keep theirs too. Nothing moves across a call with another effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrograd._torch.fx import has_effect, is_collective, is_mutating, is_random, is_wait


def order_collectives(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Order the collectives of `gm`, in place."""
    if any(map(is_collective, gm.graph.nodes)):
        _start_early(gm.graph)
        _wait_late(gm.graph)
    return gm


def _is_barrier(node: fx.Node) -> bool:
    """Whether nothing may move across the call. Random numbers and communication do not affect each other."""
    return is_mutating(node) or (has_effect(node) and not is_wait(node) and not is_random(node))


def _start_early(graph: fx.Graph) -> None:
    """Move each collective after its inputs, the collective before it, and the last barrier."""
    place: dict[fx.Node, tuple[int, int]] = {}  # of its anchor in the old order, and its number behind that
    limit = (-1, 0)
    for number, node in enumerate(graph.nodes):
        if is_collective(node) and not _is_barrier(node):
            first = max([limit, *(place[value] for value in node.all_input_nodes)])
            limit = place[node] = (first[0], first[1] + 1)
        else:
            place[node] = (number, 0)
            if _is_barrier(node) or node.op == "placeholder":
                limit = place[node]
    last = None
    for node in sorted(place, key=place.__getitem__):
        if last is not None:
            last.append(node)
        last = node


def _wait_late(graph: fx.Graph) -> None:
    """Move each wait before the first reader of its value, or a barrier before that. Unread waits stay."""
    place = {node: float(number) for number, node in enumerate(graph.nodes)}
    first_before: dict[fx.Node, fx.Node] = {}  # the first of the waits that were moved before each node
    fence = graph.output_node()
    for node in reversed(list(graph.nodes)):
        if is_wait(node) and node.users:
            target = min([*node.users, fence], key=place.__getitem__)
            first_before.get(target, target).prepend(node)
            first_before[target] = node
            place[node] = place[target] - 0.5
        elif _is_barrier(node):
            fence = node
