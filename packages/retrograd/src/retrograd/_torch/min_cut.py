"""torch's partitioners, as choosers of what is saved.

In: a joint graph and which of its placeholders are cotangents. Out: the names of the nodes that the backward
reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.lazy_modules import lazily, lazy_graph_module

__all__ = ["cut_by"]


#: what torch's partitioner gives a backward besides values of the joint graph: cotangents, and states of
#: generators from which numbers are drawn again.
_NO_VALUES = ("tangents_", "rng_state_output_", "bwd_rng_state_")


def cut_by(
    partitioner: Callable[..., Any] | None,
    gm: fx.GraphModule,
    cotangents: frozenset[str],
    forward_count: int,
    pinned: frozenset[str],
) -> list[str]:
    """What `partitioner` (None: torch's minimum cut) saves.

    Args:
        gm: the joint graph; stays as it is.
        cotangents: names of placeholders.
        forward_count: how many outputs belong to the forward.
        pinned: calls that must not be made again; if one gives several values, each is kept, whatever its
            mark says.
    """
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        copy.meta = dict(node.meta)
        if node.name in cotangents:
            copy.target = f"tangents_{node.name}"  # how torch tells them from primals
        if node.name in pinned or (node.target is operator.getitem and node.args[0].name in pinned):
            copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            copy.meta.setdefault("ac_graph_id", 0)
        if node.meta.get("is_backward"):
            copy.meta["partitioner_tag"] = "is_backward"
    names = {copy.name: node.name for node, copy in made.items()}
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    context = tracing(TracingContext(detect_fake_mode(inputs)))  # for states of generators
    with functorch_config.patch(cse=False), lazily(), context:
        _, backward = (partitioner or min_cut_rematerialization_partition)(
            lazy_graph_module(gm, graph), inputs, num_fwd_outputs=forward_count
        )
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    return [
        names.get(node.name, node.name)
        for node in placeholders
        if not str(node.target).startswith(_NO_VALUES) and names.get(node.name) not in cotangents
    ]
