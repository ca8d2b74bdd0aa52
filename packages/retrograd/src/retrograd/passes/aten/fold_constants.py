"""Compute ahead of time what depends on literals only.

In: a joint graph. Out: the same, where each call is replaced whose arguments are all literals, or results of
such calls. A number becomes a literal, a tensor with one value everywhere becomes one ``full``, and any other
small tensor becomes a constant of the module.

Not replaced: large tensors; random and uninitialised ones; and tensors that the module already holds, because
they may change between calls. A constant lives as long as the module, and the user may write to an output. So
a tensor that shares memory with an output never becomes a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from retrograd._torch.fx import aliased_inputs, is_repeatable, real_tensors
from retrograd.passes.aten.edit import nodes_seen_outside

_FULL = torch.ops.aten.full.default
_NUMBERS = (bool, int, float)


def fold_constants(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, largest: int = 4096
) -> fx.GraphModule:
    """Fold the constants of `gm`, in place.

    Args:
        gm: a graph of functional ATen operators.
        example_inputs: unused.
        largest: how many elements a folded tensor, or a tensor that it is computed from, may have.
    """
    with real_tensors():
        _fold(gm, largest)
    return gm


def _fold(gm: fx.GraphModule, largest: int) -> None:
    values = _constants(gm.graph, largest)
    seen_outside = nodes_seen_outside(gm.graph) if values else frozenset()
    for node in reversed(list(gm.graph.nodes)):
        if node not in values:
            continue
        if node.users:  # by calls that are not constant, or that stay
            _replace(gm, node, values[node], node in seen_outside)
        if not node.users:
            gm.graph.erase_node(node)


def _constants(graph: fx.Graph, largest: int) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if not is_repeatable(node) or any(value not in values for value in node.all_input_nodes):
            continue
        if not _is_small(node.meta.get("val"), largest):
            continue
        args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        value = node.target(*args, **kwargs)
        if isinstance(value, (torch.Tensor, *_NUMBERS)):
            values[node] = value
    return values


def _is_small(value: Any, largest: int) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, _NUMBERS)
    static = all(isinstance(size, int) for size in value.shape)
    return static and type(value).__name__ == "FakeTensor" and value.numel() <= largest


def _replace(gm: fx.GraphModule, node: fx.Node, value: Any, is_seen_outside: bool) -> None:
    """Let the readers of `node` read its value, if that can be written down; a view stays one of its
    source."""
    if not isinstance(value, torch.Tensor):
        node.replace_all_uses_with(value)
        return
    is_view = bool(aliased_inputs(node))
    if node.target is _FULL or (is_view and is_seen_outside):
        return
    with gm.graph.inserting_before(node):
        new = _as_full(gm.graph, value)
        if new is None and not is_view and not is_seen_outside:
            new = _as_attribute(gm, value)
    if new is not None:
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)


def _as_full(graph: fx.Graph, value: torch.Tensor) -> fx.Node | None:
    """A call that makes the tensor from one number; None if its elements or its layout do not allow that."""
    if not value.is_contiguous() or value.numel() == 0 or value.layout is not torch.strided:
        return None
    number = value.flatten()[0].item()
    if isinstance(number, complex) and not (math.isfinite(number.real) and math.isfinite(number.imag)):
        return None  # not every such number can be written down
    kwargs: dict[str, Any] = {"dtype": value.dtype, "layout": value.layout, "device": value.device}
    kwargs["pin_memory"] = False
    candidate = _FULL(list(value.shape), number, **kwargs)
    if not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (candidate, value))):  # bit for bit
        return None
    return graph.call_function(_FULL, (list(value.shape), number), kwargs)


def _as_attribute(gm: fx.GraphModule, value: torch.Tensor) -> fx.Node:
    number = 0
    while hasattr(gm, name := f"_folded_constant{number}"):
        number += 1
    gm.register_buffer(name, value.detach())
    return gm.graph.get_attr(name)
