"""A `JointGraph` becomes a program that outlives its process.

In: a joint graph, and which part of it is wanted. Out: `Exported`, or an `ExportError` that names what cannot
be represented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.fx import copied_module
from retrograd._torch.trace import encoded, guards_of, shown, symbols_of
from retrograd.aot.capture import JointGraph
from retrograd.aot.export.program import Expected, Exported, InputCheck
from retrograd.aot.export.representable import refuse_unrepresentable
from retrograd.aot.export.training import whole_backward
from retrograd.aot.extract import extract
from retrograd.errors import ExportError
from retrograd.graph.joint import Cotangent, Destination, Gradient, Primal
from retrograd.graph.joint_graph import ComputedOutput, JointValues, SizeOutput, SizeValue
from retrograd.graph.program import (
    GradientOf,
    Hidden,
    NewValue,
    ProgramInput,
    ProgramKind,
    ProgramOutput,
    ProgramSignature,
    Result,
)
from retrograd.graph.verify import output_values, verify_joint
from retrograd.passes.aten import remove_dead_code


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
        wanted = [n for n, value in enumerate(joint.values) if n in names or _is_update(joint, n)]
        outputs = [_forward_output(joint, n, names) for n in wanted]
        if kind is ProgramKind.FORWARD:
            gm = _forward(joint, wanted)
        else:
            value, loss = _loss(joint, names, loss)
            gm, order = whole_backward(joint, value, wanted)
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
    fit = _input_check(
        joint, [_input_name(joint, role, names) for role, _ in taken], [node for _, node in taken]
    )
    short = {name: f"d{number}" for number, name in enumerate(fit.symbols)}
    given = [_input(role, one, short) for (role, _), one in zip(taken, fit.expected, strict=True)]
    return Exported(kind, joint, gm, ProgramSignature(tuple(given), tuple(outputs)), fit, loss)


def _is_update(joint: JointValues, number: int) -> bool:
    return any(update.value == number for update in joint.updates)


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
    found = (
        f"{given!r} is no differentiable scalar output"
        if given
        else f"{len(scalars)} outputs could be the loss"
    )
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


def _input_name(joint: JointValues, role: Primal | Cotangent, names: dict[int, str]) -> str:
    return (
        role.name
        if isinstance(role, Primal)
        else f"cotangent of {_boundary_name(joint, role.boundary, names)}"
    )


def _input(role: Primal | Cotangent, one: Expected, short: dict[str, str]) -> ProgramInput:
    shape, stride = (
        None if trees is None else tuple(shown(tree, short) for tree in trees)
        for trees in (one.size, one.stride)
    )
    return ProgramInput(one.name, role, shape, stride, one.dtype, one.device)


def _input_check(joint: JointValues, names: Sequence[str], nodes: Sequence[fx.Node]) -> InputCheck:
    env = joint.state.fake_mode.shape_env
    expected, sizes = [], list[Any]()
    for name, node in zip(names, nodes, strict=True):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(encoded, many)) for many in (value.shape, value.stride()))
            expected.append(Expected(name, shape, stride, value.dtype, value.device))
            sizes += value.shape
        else:
            expected.append(Expected(name, None, None, None, None, encoded(value)))
            sizes.append(value)
    return InputCheck(tuple(expected), symbols_of(env, sizes), tuple(guards_of(env)))
