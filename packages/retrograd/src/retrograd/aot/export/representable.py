"""What a program that outlives its process can hold.

In: a joint graph. Out: nothing, or an `ExportError` that names the first obstacle.
"""

from __future__ import annotations

from typing import Any, NoReturn

from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import encoded, guards_of, symbols_of
from retrograd.aot.export.serialize_graph import serialize_graph
from retrograd.aot.export.serialize_values import serialize_value
from retrograd.errors import ExportError, Refusal
from retrograd.graph.joint import PrimalKind
from retrograd.graph.joint_graph import AliasOf, ConstantOutput, JointValues, PrimalValue, SameAs


def refuse_unrepresentable(joint: JointValues) -> None:
    """Check everything that a program refers to.

    Raises:
        ExportError: it cannot be represented.
    """
    for number, primal in enumerate(joint.primals):
        _check_primal(joint, number, primal)
    for number, value in enumerate(joint.values):
        if value.wrapping is not PLAIN:
            _refuse(
                "subclass",
                f"output {number} is a {value.wrapping.cls.__name__}",
                f"output {number}",
                _PLAIN_WAY,
            )
        if value.requires_grad:
            text = f"output {number} is a new leaf that requires grad"
            _refuse("new-leaf", text, f"output {number}", "let the caller call requires_grad_()")
    if joint.offsets_matter:
        text = f"{joint.state.name} reads where its inputs begin in their memory"
        _refuse("storage-offset", text, "inputs", "as_strided and storage_offset depend on it: use slices")
    _check_updates(joint)
    _check_outputs(joint)
    for leaf in joint.state.leaves:
        if leaf.kind is None:
            _check_constant(leaf.value, leaf.name, "pass it as a tensor, or close over it")
    if any(wrapping is not PLAIN for wrapping in joint.gradients.values()):
        _refuse("subclass", "a gradient is a tensor subclass", "gradients", _PLAIN_WAY)
    _check_graph(joint)


_PLAIN_WAY = "unwrap tensor subclasses before the call"


def _check_primal(joint: JointValues, number: int, primal: PrimalValue) -> None:
    if primal.wrapping is not PLAIN:
        _refuse("subclass", f"{primal.name} is a {primal.wrapping.cls.__name__}", primal.name, _PLAIN_WAY)
    if primal.group is not None:
        text = "inputs share memory, and one of them is changed in place"
        _refuse("aliased-inputs", text, primal.name, "clone one of them before the call")
    if primal.found is not None and primal.differentiable:
        text = f"{joint.state.name} uses a tensor that requires grad and is not given to it"
        way_out = "make it an argument, or a parameter of the module that is captured"
        _refuse("found-tensor", text, f"primal {number}", way_out)
    if primal.found is None and joint.state.leaves[primal.leaf or 0].name == "":
        _refuse("name", "an input has no name", f"primal {number}", "capture with aot.create_state")


def _check_updates(joint: JointValues) -> None:
    kinds = {primal.index: primal.kind for primal in joint.signature.primals}
    for update in joint.updates:
        name = joint.primals[update.primal].name
        if update.view is not None:
            text = f"{name} gets another shape in place"
            _refuse("metadata-mutation", text, name, "return a reshaped tensor instead")
        if kinds[update.primal] is not PrimalKind.BUFFER:
            found = f"{kinds[update.primal].value} {name} is changed in place"
            text = f"{found}; a program can only give new values of buffers"
            _refuse(
                "mutation",
                text,
                name,
                "change a clone and return it, or register it as a buffer of the module",
            )


def _check_outputs(joint: JointValues) -> None:
    for number, plan in enumerate(joint.outputs):
        role = f"output {number}"
        match plan:
            case AliasOf(_, source, value):
                of = f"input {_source_name(joint, source)}" if value is None else f"value {value}"
                _refuse("aliased-output", f"{role} is a view of {of}", role, "return a clone of it")
            case SameAs(source) if source >= len(joint.state.leaves):
                _refuse(
                    "found-tensor",
                    f"{role} is a tensor that was not given to it",
                    role,
                    "return a clone of it",
                )
            case ConstantOutput(constant):
                _check_constant(constant, role, "return tensors and plain constants")
            case _:
                pass


def _source_name(joint: JointValues, source: int | None) -> str:
    leaves = joint.state.leaves
    return leaves[source].name if source is not None and source < len(leaves) else "that was found"


def _check_constant(value: Any, name: str, way_out: str) -> None:
    try:
        serialize_value(value)
    except Refusal as error:
        _refuse("constant", f"{name} is {error}", name, way_out)


def _check_graph(joint: JointValues) -> None:
    env = joint.state.fake_mode.shape_env
    try:
        for node in joint.gm.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            sizes = [*value.shape, *value.stride()] if hasattr(value, "stride") else [value]
            symbols_of(env, sizes)
            for size in sizes:
                encoded(size)
        guards_of(env)
    except Refusal as error:
        _refuse("size", f"{error} cannot be represented", "sizes", "capture with static sizes")
    serialize_graph(joint.gm, {})


def _refuse(code: str, text: str, node: str, way_out: str) -> NoReturn:
    raise ExportError.because(code, text, "aot.export", node=node, way_out=way_out)
