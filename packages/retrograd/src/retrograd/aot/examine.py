"""Whether what a file says about a joint graph fits together.

In: a joint graph as it was read, whose fields have the right types. Out: nothing; or an exception that says
what does not fit. Numbers that stand for something refer to something that is there. The graph runs on its
fake inputs, and gives the values that are noted in it: its calls have the arguments that their operators
take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import is_operator_overload
from retrograd._torch.state import generator_states, restore_generator_states
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import NO_FAKE_KERNEL, fake_kernels_only, is_fake
from retrograd.graph.joint import (
    Cotangent,
    Destination,
    Gradient,
    JointSignature,
    Output,
    Primal,
    output_values,
)
from retrograd.graph.joint_graph import (
    AliasOf,
    ComputedOutput,
    JointValues,
    SameAs,
    SizeOutput,
    SizeValue,
    View,
)

#: a call that takes a dimension of so many elements apart is not run: it may make as many tensors.
_MANY = 10_000


def examine_trace(found: Mapping[str, Any]) -> None:
    """Examine the fields of a `JointValues` that describe its graph's inputs and outputs.

    Raises:
        ValueError: something does not fit.
    """
    signature, primals = found["signature"], found["primals"]
    counts = {
        "primal": len(primals),
        "value": len(found["values"]),
        "boundary": len(signature.boundaries),
        "region": len(signature.regions),
    }
    for kind, number in [*_of_signature(signature), *_of_trace(found)]:
        if type(number) is not int or not 0 <= number < counts[kind]:
            raise ValueError(f"{kind} {number} of {counts[kind]}")
    _check_signature(signature, len(primals), len(found["values"]))
    if found["out_spec"].num_leaves != len(found["outputs"]):
        raise ValueError(f"{len(found['outputs'])} outputs, where their container has others")
    for part in (*primals, *found["values"]):
        if part.wrapping is not PLAIN:
            raise ValueError("a subclass of tensors")
    for primal in primals:
        if not isinstance(primal.fake, torch.Tensor) or primal.group is not None:
            raise ValueError(f"primal {primal.name} is no tensor of its own")
        if (primal.leaf is None) is (primal.found is None):
            raise ValueError(f"primal {primal.name} is neither an input nor a tensor that is kept")


def _of_signature(signature: JointSignature) -> Iterator[tuple[str, int]]:
    """The numbers in a signature, each with what it is a number of."""
    for role in (*signature.inputs, *signature.outputs):
        if role.part != 0:
            raise ValueError("a part of a subclass of tensors")
        if isinstance(role, Primal):
            yield "primal", role.index
        elif isinstance(role, Cotangent):
            yield "boundary", role.boundary
        elif isinstance(role, Output):
            yield "value", role.index
        else:
            yield "region", role.region
            yield _kind(role.of), role.of.index
    for boundary in signature.boundaries:
        yield "value", boundary.value
    for region in signature.regions:
        yield from (("boundary", root) for root in region.roots)
        yield from ((_kind(one), one.index) for one in region.destinations)
    yield from (("primal" if step.is_leaf else "region", step.index) for step in signature.order)


def _of_trace(found: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for number, destination in found["gradients"]:
        yield "region", number
        yield _kind(destination), destination.index
    yield from (("boundary", value.boundary) for value in found["values"] if value.boundary is not None)
    for update in found["updates"]:
        yield "primal", update.primal
        yield from [("value", update.value)] if update.value is not None else []
        yield from _of_view(update.view)
    for plan in found["outputs"]:
        if isinstance(plan, ComputedOutput):
            yield "value", plan.value
        elif isinstance(plan, SizeOutput):
            yield from (("value", size.value) for size in plan.sizes if isinstance(size, SizeValue))
        elif isinstance(plan, AliasOf):
            yield from (("value", number) for number in (plan.value, plan.made) if number is not None)
            yield from _of_view(plan.view)


def _of_view(view: View | None) -> Iterator[tuple[str, int]]:
    if view is None:
        return
    if view.origin is not None:
        raise ValueError("a view with an origin")
    numbers = (*view.size, *view.stride, view.offset, *view.numbers)
    yield from (("value", number.value) for number in numbers if isinstance(number, SizeValue))


def _kind(destination: Destination) -> str:
    return "boundary" if destination.is_boundary else "primal"


def _check_signature(signature: JointSignature, primals: int, values: int) -> None:
    """Each primal has one input, each boundary at most one; each value has one output, each gradient one of
    the destinations of its region."""
    inputs = [role.index if isinstance(role, Primal) else None for role in signature.inputs]
    boundaries = [role.boundary for role in signature.inputs if isinstance(role, Cotangent)]
    outputs = [role.index for role in signature.outputs if isinstance(role, Output)]
    gradients = [role for role in signature.outputs if isinstance(role, Gradient)]
    if inputs != [*range(primals), *[None] * len(boundaries)] or len({*boundaries}) != len(boundaries):
        raise ValueError("inputs that are not the primals and the cotangents, one by one")
    if len({*outputs}) != len(outputs) or signature.outputs[: len(outputs)] != tuple(
        role for role in signature.outputs if isinstance(role, Output)
    ):
        raise ValueError("outputs that are not the values and the gradients, one by one")
    for role in gradients:
        if role.of not in signature.regions[role.region].destinations:
            raise ValueError(f"{role}, which does not give it")


def examine(joint: JointValues) -> None:
    """Examine the graph and the leaves of a joint graph; `examine_trace` has seen the rest.

    Raises:
        Exception: something does not fit.
    """
    leaves = joint.state.leaves
    sources = len(leaves) + len(joint.found)
    for plan in joint.outputs:
        source = plan.source if isinstance(plan, (SameAs, AliasOf)) else 0
        if source is not None and not 0 <= source < sources:
            raise ValueError(f"source {source} of {sources}")
    owners = [primal.leaf for primal in joint.primals if primal.leaf is not None]
    tensors = [number for number, leaf in enumerate(leaves) if leaf.kind is not None and leaf.same_as is None]
    if sorted(owners) != tensors:
        raise ValueError(f"primals of the leaves {owners}, where {tensors} are tensors")
    for number, leaf in enumerate(leaves):
        if leaf.same_as is not None and (not 0 <= leaf.same_as < number or leaf.same_as not in tensors):
            raise ValueError(f"leaf {number} is the same as {leaf.same_as}")
    if joint.state.in_spec is not None and joint.state.in_spec.num_leaves > len(leaves):
        raise ValueError(f"{len(leaves)} leaves, where the arguments have more")
    _check_regions(joint.gm.graph, joint.signature)
    inputs = [node.meta["val"] for node in joint.gm.graph.find_nodes(op="placeholder")]
    modes = joint.state.thread_modes._replace(autocast=(), grad=False)
    states = generator_states()
    try:
        with modes.restored(), fake_kernels_only(joint.state.fake_mode):
            _Rerun(joint.gm).run(*inputs)
    finally:
        restore_generator_states(states)  # a fake kernel of somebody's may draw numbers


def _check_regions(graph: fx.Graph, signature: JointSignature) -> None:
    """What a call of a region makes, only this region reads. The forward gives tensors of its own."""

    def region_of(node: fx.Node) -> int | None:
        return node.meta["region"] if node.op == "call_function" and node.meta.get("is_backward") else None

    for node in graph.nodes:
        region = region_of(node)
        if region is not None and not 0 <= region < len(signature.regions):
            raise ValueError(f"{node.name} is of region {region} of {len(signature.regions)}")
        for read in node.all_input_nodes if node.op == "call_function" else ():
            if region_of(read) not in (None, region):
                raise ValueError(f"{node.name} reads {read.name} of another region")
    for value, role in zip(output_values(graph), signature.outputs, strict=True):
        region, allowed = None, (None, role.region) if isinstance(role, Gradient) else (None,)
        if isinstance(value, fx.Node):
            region = region_of(value)
        elif value is not None or isinstance(role, Output):
            raise ValueError(f"{role} is {value!r:.80}")
        if region not in allowed:
            raise ValueError(f"{role} is {value} of another region")


class _Rerun(fx.Interpreter):
    """Runs a graph on fakes; each value is like the noted one, which takes its place."""

    def run_node(self, n: fx.Node) -> Any:
        """The noted value of a node."""
        if n.op == "output":
            return None
        noted = n.meta["val"]
        if n.op == "get_attr" and isinstance(self.fetch_attr(str(n.target)), fx.GraphModule):
            return super().run_node(n)
        if n.op == "call_function" and self._makes_many(n):
            return noted
        try:
            found = super().run_node(n)
        except NO_FAKE_KERNEL:
            return noted
        if not _is_like(found, noted):
            raise ValueError(f"{n.name} is noted as another value than {n.target} gives")
        return noted

    def _makes_many(self, n: fx.Node) -> bool:
        returned = n.target._schema.returns if is_operator_overload(n.target) else ()
        if not any(str(one.type).startswith("List") for one in returned):
            return False
        args: Any = self.map_nodes_to_values(n.args, n)
        return any(size > _MANY for one in args if isinstance(one, torch.Tensor) for size in one.shape)


def _is_like(found: Any, noted: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return is_fake(noted) and (found.dtype, found.device, found.shape) == (
            noted.dtype,
            noted.device,
            noted.shape,
        )
    if isinstance(found, Sequence) and not isinstance(found, str):
        return isinstance(noted, Sequence) and len(found) == len(noted) and all(map(_is_like, found, noted))
    return type(found) is type(noted) and bool(found == noted)
