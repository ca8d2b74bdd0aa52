"""The backward of a region, traced for cotangents laid out as they really come.

In: a partition, one of its regions, and strides. Out: a graph in place of the region's own, which takes what
it takes; None where there is none. Formulas look at how a cotangent lies in memory (``grad.contiguous()``),
so that a graph that was traced for one layout is not right for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from retrograd._torch.autograd import outside_of_graph_task
from retrograd._torch.fx import has_effect
from retrograd._torch.trace import guard_count
from retrograd.aot.capture import capture
from retrograd.aot.extract import extract, finished_backward, needed_between
from retrograd.aot.run.cotangents import Strides
from retrograd.aot.trace.aliases import is_backward
from retrograd.errors import RetrogradError
from retrograd.graph.joint import Gradient
from retrograd.graph.joint_graph import JointValues
from retrograd.graph.partition import Partition


def traced_for(partition: Partition, number: int, layouts: Mapping[int, Strides]) -> fx.GraphModule | None:
    """The backward of region `number` for cotangents with these strides, by boundary."""
    state, before = partition.joint.state, guard_count(partition.joint.state.fake_mode)
    try:
        joint = outside_of_graph_task(
            lambda: capture(
                state,
                single_region=partition.joint.is_single_region,
                split_at_leaf_grads=bool(partition.joint.hooked_leaves),
                sums_apart=partition.joint.sums_apart,
                layouts=layouts,
            ),
            False,
        )
    except RetrogradError:
        return None
    if guard_count(state.fake_mode) != before or not _is_alike(partition.joint, joint, number):
        return None  # a guard that nobody would check, or another program
    return _cut_out(partition, joint, number)


def _is_alike(before: JointValues, now: JointValues, number: int) -> bool:
    one, other = before.signature, now.signature
    return one.regions == other.regions and _wrappings(before, number) == _wrappings(now, number)


def _wrappings(joint: JointValues, number: int) -> dict[Any, Any]:
    return {there: wrapping for (region, there), wrapping in joint.gradients.items() if region == number}


def _cut_out(partition: Partition, joint: JointValues, number: int) -> fx.GraphModule | None:
    graph, own = joint.gm.graph, partition.backwards[number].gm
    named = {node.name: node for node in graph.nodes}
    taken = [node.name for node in own.graph.find_nodes(op="placeholder")]
    targets = {node.name: node.target for node in partition.joint.gm.graph.nodes}
    if any(name not in named or named[name].target != targets.get(name) for name in taken):
        return None
    given = [named[name] for name in taken]
    results: Any = graph.output_node().args[0]
    wanted = [
        node
        for node, role in zip(results, joint.signature.outputs, strict=True)
        if isinstance(role, Gradient) and role.region == number
    ]
    inside = needed_between(given, wanted)
    if any(node.op == "placeholder" or (has_effect(node) and not is_backward(node)) for node in inside):
        return None  # it reads what was not saved, or would draw numbers anew
    effects = [n for n in graph.nodes if is_backward(n) and n.meta["region"] == number and has_effect(n)]
    return finished_backward(extract(joint.gm, given, wanted, f"backward_{number}", also=effects))
