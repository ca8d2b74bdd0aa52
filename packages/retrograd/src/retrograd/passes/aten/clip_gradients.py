"""Clip the gradients of the parameters by their norm, inside the graph.

In: a joint graph with one region. Out: the same, where the gradients of parameters are scaled so that their
common norm is at most ``max_norm``. ``torch.nn.utils.clip_grad_norm_`` does this right after a backward that
starts without gradients. The operations are the same (those of ``get_total_norm`` and
``clip_grads_with_norm_``). Norms are added in the order of the parameters. torch does so too if all
parameters have one dtype and one device. Otherwise torch adds them by group, in the order of a hash table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from retrograd.errors import PassError
from retrograd.graph.joint import JointSignature, output_values
from retrograd.passes.aten.edit import call, signature_of

_aten = torch.ops.aten
_NAME = "clip_gradients"


def clip_gradients(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, max_norm: float, norm_type: float = 2.0
) -> fx.GraphModule:
    """Clip the gradients of the parameters of `gm`, in place.

    Args:
        gm: a joint graph with its signature.
        example_inputs: unused.
        max_norm: the largest norm that the gradients of all parameters may have together.
        norm_type: which norm; ``float("inf")`` for the largest element.

    Raises:
        PassError: the graph has several regions, which run at different times, while the norm needs all
            gradients; or it has gradients, but none of a parameter; or one is not a strided tensor.
    """
    outputs = list(output_values(gm.graph))
    positions = [n for n in _positions(signature_of(gm, _NAME)) if outputs[n] is not None]
    if not positions:
        return gm
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        gradients = [_checked(outputs[position]) for position in positions]
        coefficient = _coefficient(gradients, float(max_norm), float(norm_type))
        for position, gradient in zip(positions, gradients, strict=True):
            factor = _on_device_of(gradient, coefficient)
            outputs[position] = call(gradient, _aten.mul.Tensor, (gradient, factor))
    output.args = (tuple(outputs),)
    gm.recompile()
    return gm


def _positions(signature: JointSignature) -> list[int]:
    """The positions of parameters' gradients among the outputs, in the order of the parameters."""
    if len(signature.regions) > 1:
        text = f"the backward runs in {len(signature.regions)} parts, and the norm needs the gradients of all"
        way_out = "return one differentiable output, or call torch.nn.utils.clip_grad_norm_ afterwards"
        _refuse("several-regions", text, way_out, f"region {signature.regions[1].roots} of the signature")
    found = signature.parameter_gradients
    if not found and (count := len(signature.outputs) - signature.forward_count):
        text = f"none of the {count} gradients is of a parameter"
        _refuse("no-parameters", text, "capture the module, so that its parameters have that role")
    return found


def _checked(gradient: Any) -> fx.Node:
    value = gradient.meta.get("val") if isinstance(gradient, fx.Node) else gradient
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        text = f"the gradient {gradient} is no strided tensor with known metadata"
        _refuse("no-tensor", text, 'keep meta["val"] in passes before, and clip sparse gradients outside')
    return gradient


def _coefficient(gradients: list[fx.Node], max_norm: float, norm_type: float) -> fx.Node:
    """What every gradient is multiplied by: at most 1."""
    first = gradients[0]
    norm = _aten.linalg_vector_norm.default
    norms = [call(gradient, norm, (gradient, norm_type)) for gradient in gradients]
    moved = [_on_device_of(first, value) for value in norms]
    stacked = call(first, _aten.stack.default, (moved,))
    total = call(first, norm, (stacked, norm_type))
    shifted = call(first, _aten.add.Tensor, (total, 1e-6))
    inverse = call(first, _aten.reciprocal.default, (shifted,))
    scaled = call(first, _aten.mul.Tensor, (inverse, max_norm))
    return call(first, _aten.clamp.default, (scaled, None, 1.0))


def _on_device_of(gradient: fx.Node, value: fx.Node) -> fx.Node:
    device = gradient.meta["val"].device
    if value.meta["val"].device == device:
        return value
    return call(value, _aten._to_copy.default, (value,), {"device": device})


def _refuse(code: str, text: str, way_out: str, node: str = "") -> None:
    raise PassError.because(code, text, f"passes.{_NAME}", node=node, way_out=way_out)
