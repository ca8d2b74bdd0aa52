"""Asks torch's partitioners what to save.

In: a joint graph, and which of its placeholders are cotangents. Out: the names of the nodes that the backward
reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.errors import Escape
from retrograd.facts.patches import handled_here
from retrograd.graph.fx import copied, lazily, lazy_graph_module
from retrograd.graph.reach import reached

#: prefixes of a backward's inputs that are not values of the joint graph: cotangents, and generator states
#: for drawing the same random numbers again.
_NO_VALUES = ("tangents_", "rng_state_output_", "bwd_rng_state_")


def memory_budget(gm: fx.GraphModule) -> float:
    """The share of what torch's minimum cut would save that may be saved. It is 1,
    ``torch._functorch.config.activation_memory_budget``, or the budget set for a region of the program."""
    marks = (value for node in gm.graph.nodes for value in _budgets_of(node))
    return min(marks, default=functorch_config.activation_memory_budget)


def _budgets_of(node: fx.Node) -> list[float]:
    notes = node.meta.get("custom") or {}
    text = (node.meta.get("memory_budget"), notes.get("_region_activation_memory_budget"))
    return [value for value in text if isinstance(value, float)]


def cut_by(
    partitioner: Callable[..., Any] | None,
    gm: fx.GraphModule,
    cotangents: frozenset[str],
    forward_count: int,
    pinned: frozenset[str],
) -> list[str]:
    """The names of what `partitioner` saves (None: torch's minimum cut).

    Args:
        partitioner: a partitioner in torch's format.
        gm: the joint graph; not changed.
        cotangents: names of placeholders.
        forward_count: how many outputs belong to the forward.
        pinned: calls that must not be recomputed. If one returns several values, all are saved, whatever its
            policy says.
    """
    graph = copied(gm.graph)
    for node in graph.nodes:
        if node.name in pinned or (node.target is operator.getitem and node.args[0].name in pinned):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta.setdefault("ac_graph_id", 0)
        if node.meta.get("is_backward"):
            node.meta["partitioner_tag"] = "is_backward"
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    context = tracing(TracingContext(detect_fake_mode(inputs)))  # for generator states
    module = lazy_graph_module(gm, graph)
    with functorch_config.patch(cse=False), lazily(), context:
        if partitioner is None:
            chosen = [node.name for node in _minimum_cut(module, inputs, forward_count)]
        else:
            _, backward = partitioner(module, inputs, num_fwd_outputs=forward_count)
            inputs = backward.graph.find_nodes(op="placeholder")
            chosen = [node.name for node in inputs if not str(node.target).startswith(_NO_VALUES)]
    return [name for name in chosen if name not in cotangents]


def _minimum_cut(module: fx.GraphModule, inputs: Sequence[Any], forward_count: int) -> Sequence[fx.Node]:
    """The nodes that torch's minimum cut saves and that the backward reads.

    We stop torch after it has chosen. It would go on to build two graphs, which takes as long again, and we
    build our own.
    """

    def stop(original: Any, joint: Any, values: Any, saved_sym_nodes: Any, *args: Any, **kwargs: Any) -> Any:
        raise Escape(_read_of(joint.graph, forward_count, {*values, *saved_sym_nodes}))

    with handled_here("torch._functorch.partitioners:_extract_fwd_bwd_modules", stop):
        try:
            partitioners.min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=forward_count)
        except Escape as chosen:
            saved: Sequence[fx.Node] = chosen.value
            return saved
    raise AssertionError("torch's partitioner has made no halves")


def _read_of(graph: fx.Graph, forward_count: int, saved: set[fx.Node]) -> list[fx.Node]:
    """The nodes of `saved` that the results after the first `forward_count` are computed from."""
    results: Any = graph.output_node().args[0]
    wanted = (node for node in results[forward_count:] if isinstance(node, fx.Node))
    seen = reached(wanted, lambda node: () if node in saved else node.all_input_nodes)
    return [node for node in graph.nodes if node in saved and node in seen]
