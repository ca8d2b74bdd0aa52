"""A `JointGraph` becomes a program that outlives its process.

In: a joint graph, and which part of it is wanted. Out: `Exported`, or an `ExportError` that names the first
thing in it that no such program can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.fx import copied_module
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import encoded, guards_of, shown, symbols_of
from retrograd.aot.capture import JointGraph
from retrograd.aot.export.program import (
    Exported,
    GradientOf,
    Hidden,
    InputCheck,
    NewValue,
    ProgramInput,
    ProgramKind,
    ProgramOutput,
    ProgramSignature,
    Result,
)
from retrograd.aot.export.training import WholeBackward
from retrograd.aot.parts import extract
from retrograd.errors import ExportError, Refusal
from retrograd.graph.joint import (
    Cotangent,
    Destination,
    Gradient,
    Primal,
    PrimalKind,
    output_values,
    verify_joint,
)
from retrograd.graph.joint_graph import (
    AliasOf,
    ComputedOutput,
    ConstantOutput,
    JointValues,
    PrimalValue,
    SameAs,
    SizeOutput,
    SizeValue,
)
from retrograd.passes.aten.remove_dead_code import remove_dead_code
from retrograd.serialize import serialize_graph, serialize_value


def export(
    joint: JointGraph, *, kind: str | ProgramKind = ProgramKind.JOINT, loss: str | None = None
) -> Exported:
    """Make a program of `joint`.

    Parameters and buffers are inputs of the program, not part of it. Tensors that the function found by
    itself, and that do not require grad, are kept by value. New values of buffers are outputs.

    Args:
        joint: from ``capture``, perhaps changed by passes.
        kind: ``"joint"``: (primals, cotangents) -> (outputs, gradients); ``"forward"``: primals -> outputs;
            ``"training"``: primals -> (outputs, gradients of the loss).
        loss: for training, the output that is differentiated, such as ``"output['loss']"``; not needed if
            only one output is a differentiable scalar.

    Raises:
        ExportError: the graph changes an argument in place, gives an output that is a view, or refers to
            something of this process; or there is no such loss.
        VerificationError: the graph breaks a law of joint graphs.
    """
    chosen = ProgramKind(kind)
    verify_joint(joint.gm, joint.signature, "aot.export", [report.name for report in joint.reports])
    refuse_unrepresentable(joint)
    return program_of(joint, chosen, loss)


def program_of(joint: JointGraph, kind: ProgramKind, loss: str | None) -> Exported:
    """The program, of a joint graph that can be represented."""
    names = _output_names(joint)
    inputs = [role for role in joint.signature.inputs if isinstance(role, Primal)]
    outputs: list[ProgramOutput]
    if kind is ProgramKind.JOINT:
        gm, outputs = copied_module(joint.gm), _joint_outputs(joint, names)
        inputs = list(joint.signature.inputs)  # type: ignore[arg-type]
    else:
        written = {update.value for update in joint.updates}
        wanted = [n for n in range(len(joint.values)) if n in names or n in written]
        outputs = [_forward_output(joint, n, names) for n in wanted]
        if kind is ProgramKind.FORWARD:
            gm = _forward(joint, wanted)
        else:
            value, loss = _loss(joint, names, loss)
            gm, order = WholeBackward(joint).built(value, wanted)
            ends = [Destination(primal) for primal in order]
            outputs += [
                ProgramOutput(f"gradient of {joint.primals[e.index].name}", GradientOf(e, None)) for e in ends
            ]
    placeholders = gm.graph.find_nodes(op="placeholder")
    taken = [
        (role, node)
        for role, node in zip(inputs, placeholders, strict=True)
        if isinstance(role, Cotangent) or joint.primals[role.index].found is None
    ]
    env, values = joint.state.fake_mode.shape_env, [node.meta["val"] for _, node in taken]
    sizes = [size for one in values for size in (one.shape if isinstance(one, torch.Tensor) else (one,))]
    symbols = symbols_of(env, sizes)
    short = {name: f"d{number}" for number, name in enumerate(symbols)}
    given = tuple(
        _input(joint, role, value, names, short) for (role, _), value in zip(taken, values, strict=True)
    )
    check = InputCheck(given, symbols, tuple(guards_of(env)))
    return Exported(kind, joint, gm, ProgramSignature(given, tuple(outputs)), check, loss)


def _output_names(joint: JointValues) -> dict[int, str]:
    """By forward value, the path to it in what the function returns."""
    filled = pytree.tree_unflatten(list(range(len(joint.outputs))), joint.out_spec)
    names: dict[int, str] = {}
    for path, position in pytree.tree_flatten_with_path(filled)[0]:
        plan = joint.outputs[position]
        if isinstance(plan, ComputedOutput):
            names.setdefault(plan.value, "output" + pytree.keystr(path))
        for place, size in enumerate(plan.sizes) if isinstance(plan, SizeOutput) else ():
            if isinstance(size, SizeValue):
                names.setdefault(size.value, f"output{pytree.keystr(path)}[{place}]")
    return names


def _forward_output(joint: JointValues, number: int, names: dict[int, str]) -> ProgramOutput:
    for update in joint.updates:
        if update.value == number:
            return ProgramOutput(f"new value of {joint.primals[update.primal].name}", NewValue(update.primal))
    if number in names:
        return ProgramOutput(names[number], Result(number))
    boundary = next(i for i, one in enumerate(joint.signature.boundaries) if one.value == number)
    return ProgramOutput(f"stand-in of boundary {boundary}", Hidden(boundary))


def _joint_outputs(joint: JointValues, names: dict[int, str]) -> list[ProgramOutput]:
    outputs = []
    several = len(joint.signature.regions) > 1
    for role in joint.signature.outputs:
        if isinstance(role, Gradient):
            of = role.of
            name = _boundary_name(joint, of.index, names) if of.is_boundary else joint.primals[of.index].name
            suffix = f" from region {role.region}" if several else ""
            outputs.append(ProgramOutput(f"gradient of {name}{suffix}", GradientOf(of, role.region)))
        else:
            outputs.append(_forward_output(joint, role.index, names))
    return outputs


def _boundary_name(joint: JointValues, boundary: int, names: dict[int, str]) -> str:
    number = joint.signature.boundaries[boundary].value
    if number in names:
        return names[number]
    return next(
        (f"new {joint.primals[update.primal].name}" for update in joint.updates if update.value == number),
        f"boundary {boundary}",
    )


def _forward(joint: JointValues, wanted: Sequence[int]) -> fx.GraphModule:
    values = output_values(joint.gm.graph)
    placeholders = joint.gm.graph.find_nodes(op="placeholder")
    primals = placeholders[: len(joint.signature.primals)]
    gm = extract(joint.gm, primals, [values[number] for number in wanted], "forward")
    remove_dead_code(gm)
    gm.recompile()
    return gm


def _loss(joint: JointValues, names: dict[int, str], given: str | None) -> tuple[int, str]:
    values = output_values(joint.gm.graph)
    scalars = {
        names[boundary.value]: boundary.value
        for boundary in joint.signature.boundaries
        if boundary.value in names and _is_real_scalar(values[boundary.value])
    }
    if given is None and len(scalars) == 1:
        ((name, value),) = scalars.items()
        return value, name
    if given in scalars:
        return scalars[given], given
    known = ", ".join(scalars) or "none"
    found = f"{len(scalars)} outputs could be the loss"
    if given:
        found = f"{given!r} is no differentiable scalar output"
    raise ExportError.because(
        "loss",
        f"{found} of {joint.state.name}; there are: {known}",
        "aot.export",
        node=given or "",
        way_out="loss=, with one of these names; or let the function return its loss",
    )


def _is_real_scalar(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def _input(
    joint: JointValues, role: Primal | Cotangent, value: Any, names: dict[int, str], short: dict[str, str]
) -> ProgramInput:
    if isinstance(role, Primal):
        name = role.name
    else:
        name = f"cotangent of {_boundary_name(joint, role.boundary, names)}"
    if not isinstance(value, torch.Tensor):
        return ProgramInput(name, role, None, None, None, None, ([encoded(value)], []))
    trees = [*map(encoded, value.shape)], [*map(encoded, value.stride())]
    shape, stride = (tuple(shown(tree, short) for tree in many) for many in trees)
    return ProgramInput(name, role, shape, stride, value.dtype, value.device, trees)


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
                known = source is not None and source < len(joint.state.leaves)
                given = joint.state.leaves[source].name if known else "that was found"  # type: ignore[index]
                of = f"input {given}" if value is None else f"value {value}"
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
