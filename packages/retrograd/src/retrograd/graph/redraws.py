"""Random numbers that a backward draws again instead of saving them.

In: a joint graph and one of its random calls. Out: the generator's state, as a value that is saved, and a
second call that draws from it. Inductor's own random numbers have a seed instead (`backends.inductor.seeds`).
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from retrograd.graph.fx import first_tensor, is_operator_overload, real_tensors

_SAVES, _DRAWS = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state


def draw_from_state(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Replace a random call by one that also saves the generator's state.

    Returns:
        The state, the value that replaces `node`, and a call that draws the same value again.
    """
    draw: tuple[Any, ...] = (node.target, *node.args)
    with graph.inserting_before(node):
        both = graph.call_function(_SAVES, draw, dict(node.kwargs))
        state = graph.call_function(getitem, (both, 0))
        value = graph.call_function(getitem, (both, 1))
        redrawn = graph.call_function(_DRAWS, (state, *draw), dict(node.kwargs))
    for made in (both, value, redrawn):
        made.meta = dict(node.meta)
    value.name, redrawn.name = f"{node.name}_drawn", f"{node.name}_again"
    state.meta["val"] = _fake_state(node)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return state, value, redrawn


def has_redraws(graph: fx.Graph) -> bool:
    """True if the graph computes random numbers again, from a saved generator state or a seed."""
    return any(node.target is _DRAWS or is_seeded(node) for node in graph.nodes)


def is_seeded(node: fx.Node) -> bool:
    """True if the call computes random numbers from a seed."""
    return is_operator_overload(node.target) and node.target.name() == "prims::inductor_random"


def _fake_state(node: fx.Node) -> torch.Tensor:
    """A fake of the state of the generator from which a call draws."""
    value = first_tensor(node.meta["val"])
    with real_tensors():
        cuda = value.device.type == "cuda" and torch.cuda.is_available()
        size = (torch.cuda.get_rng_state() if cuda else torch.random.get_rng_state()).numel()
    with value.fake_mode:
        return torch.empty(size, dtype=torch.uint8)
