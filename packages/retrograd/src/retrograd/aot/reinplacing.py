"""Reinplacing: let a forward graph write its input mutations itself.

In: a `Partition` without backwards, such as an optimizer's step. Out: an equal partition whose forward graph
writes new elements into its inputs, each as soon as nothing reads the old ones any more.

Any other graph returns the new elements, and the call copies them into the inputs once nothing can fail any
more. That needs memory for both, and reads and writes every element once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.facts import answers
from retrograd.graph.aliases import aliased_inputs
from retrograd.graph.fx import copied_module, lazy_graph
from retrograd.graph.joint import output_values
from retrograd.graph.joint_graph import JointValues, Partition, Update
from retrograd.graph.reach import origins
from retrograd.runtime.subclass import PLAIN
from retrograd.runtime.tensor import is_lazy


def writing_ahead(partition: Partition) -> Partition:
    """Reinplace input mutations where possible. The result's ``written_ahead`` lists the primals that its
    forward graph writes."""
    joint, summary = partition.joint, partition.ahead.summary
    checks = {str(one) for one, how in answers("raises").items() if how == "only"}
    has_effects = summary.has_effects_besides_random or not checks.isdisjoint(summary.targets)
    if partition.backwards or not joint.updates or has_effects:
        return partition  # We could not undo the call's effects.
    gm = copied_module(partition.forward)
    forward: Sequence[Any] = joint.signature.outputs[: joint.signature.forward_count]
    places = {role.index: place for place, role in enumerate(forward)}
    results = [*output_values(gm.graph)]
    inputs = gm.graph.find_nodes(op="placeholder")
    last = _last_reads(gm.graph)
    written = set()
    for update in _simple(joint):
        place, target = places[update.value], inputs[update.primal]
        value = results[place]
        if isinstance(value, fx.Node) and _is_written_as_it_is(value, target):
            behind = max(value, last.get(target, value))
            with gm.graph.inserting_after(behind):
                write = gm.graph.call_function(torch.ops.aten.copy_.default, (target, value))
            write.meta["val"] = target.meta["val"]
            results[place] = None
            written.add(update.primal)
    if not written:
        return partition
    gm.graph.output_node().args = (tuple(results),)
    gm.recompile()
    return replace(partition, ahead=lazy_graph(gm, summary.inputs), written_ahead=frozenset(written))


def _simple(joint: JointValues) -> list[Update]:
    """The updates that change only elements, of a plain tensor input that shares no memory with others."""
    if any(primal.wrapping is not PLAIN for primal in joint.primals):
        return []
    uses = Counter(update.value for update in joint.updates)
    return [
        update
        for update in joint.updates
        if update.value is not None
        and update.view is None
        and uses[update.value] == 1
        and joint.values[update.value].wrapping is PLAIN
        and joint.primals[update.primal].group is None
    ]


def _last_reads(graph: fx.Graph) -> Mapping[fx.Node, fx.Node]:
    """For each value that owns memory, the last call that may read it, directly or through a view."""
    owners = origins(graph.nodes, aliased_inputs)
    calls = (node for node in graph.nodes if node.op == "call_function")
    return {owner: node for node in calls for value in node.all_input_nodes for owner in owners[value]}


def _is_written_as_it_is(value: fx.Node, target: fx.Node) -> bool:
    """Whether the graph computes `value`, with the dtype, device and sizes of `target`."""
    new, old = value.meta.get("val"), target.meta.get("val")
    return (
        value.op == "call_function"
        and isinstance(new, torch.Tensor)
        and isinstance(old, torch.Tensor)
        and (new.dtype, new.device, new.shape) == (old.dtype, old.device, old.shape)
        and not (is_lazy(new) or is_lazy(old))
    )
