"""Why graphs of operators are not recorded.

In: ATen graphs with the fakes of their values. Out: the reason, or the device on which all of it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import is_collective, is_higher_order, is_mutating, is_random, is_symbolic, schema_of
from retrograd.errors import Reason

#: codes of reasons that concern one call.
NOT_NOW, HELD = "cuda-graphs-not-now", "cuda-graphs-held"

_UNSAFE = frozenset(
    getattr(torch.Tag, name)
    for name in ("data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)
#: operators of higher order that only start kernels.
_KERNELS = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")


def why_not_recorded(graphs: Sequence[fx.Graph], device_type: str = "cuda") -> Reason | None:
    """Why calls of code that was compiled from these graphs are not recorded; None if nothing speaks against
    it."""
    nodes = [node for graph in graphs for node in graph.nodes]
    for node in nodes:
        if (text := _of_call(node) if node.op == "call_function" else None) is not None:
            return refusal("cuda-graphs-operator", f"{text} ({node.name})")
    values = [value for node in nodes for value in _tensors(node.meta.get("val"))]
    inputs = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    has_numbers = any(value is not None and not isinstance(value, torch.Tensor) for value in inputs)
    if has_numbers or any(map(is_symbolic, values)):
        return refusal("cuda-graphs-dynamic", "its sizes are symbolic", "dynamic=False")
    if any(value.layout is not torch.strided for value in values):
        return refusal("cuda-graphs-layout", "it has tensors that are not strided")
    devices = {value.device for value in values}
    if others := sorted(str(device) for device in devices if device.type != device_type):
        return refusal("cuda-graphs-device", f"it has tensors on {', '.join(others)}")
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        return refusal("cuda-graphs-device", f"its tensors are on {found}, and not on one device")
    return None


def device_of(graphs: Sequence[fx.Graph]) -> torch.device:
    """The device of graphs that have only one."""
    values = (node.meta.get("val") for graph in graphs for node in graph.nodes)
    return next(tensor.device for value in values for tensor in _tensors(value))


def refusal(code: str, text: str, way_out: str = "nothing to do: results are the same") -> Reason:
    """A reason for running without a CUDA graph."""
    return Reason(code, f"no CUDA graph is recorded: {text}", "cudagraphs", way_out=way_out)


def is_passing(reason: Reason) -> bool:
    """Whether the reason concerns one call, and not all that come."""
    return reason.code in (NOT_NOW, HELD)


def _of_call(node: fx.Node) -> str | None:
    if is_higher_order(node.target):
        return None if node.target.name() in _KERNELS else "it runs other graphs"  # type: ignore[union-attr]
    if is_random(node) and (why := _why_not_random(node)) is not None:
        return why
    if _UNSAFE & set(getattr(node.target, "tags", ())):
        return "what it does depends on values"
    if is_collective(node):
        return "it communicates"
    if is_mutating(node) and any(value.op == "placeholder" for value in node.all_input_nodes):
        return "it writes to an input"
    return None


def _why_not_random(node: fx.Node) -> str | None:
    """What speaks against random numbers in a recording. It counts on the device's own generator, whose state
    each replay takes up and moves on; fused attention hands that state out as a value."""
    if node.kwargs.get("generator") is not None:
        return "it draws random numbers from a generator of its own"
    for place, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            named = node.kwargs.get("dropout_p", argument.default_value)
            dropped = node.args[place] if place < len(node.args) else named
            return None if dropped == 0.0 else "it drops out in attention"
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
