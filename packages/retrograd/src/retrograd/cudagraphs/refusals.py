"""Decides which graphs can never be recorded as a CUDA graph, and why.

In: graphs with example values. Out: a `Reason`, or None; or the calls that prevent the recording of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from retrograd.errors import Reason
from retrograd.graph.fx import (
    depends_on_data,
    has_effect,
    is_collective,
    is_higher_order,
    is_mutating,
    is_operator_overload,
    is_random,
    is_symbolic,
    is_wait,
    is_write_to_input,
    written_inputs,
)
from retrograd.runtime.tensor import tensors_in
from retrograd.trace import places_of_symbols, symbols_in

#: higher-order operators that only start kernels.
_KERNELS = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")


def why_not_recorded(graphs: Sequence[fx.Graph], device_type: str = "cuda") -> Reason | None:
    """Why we do not record calls of code that was compiled from these graphs; None if we may record them."""
    nodes = [node for graph in graphs for node in graph.nodes]
    if len(graphs) > 1 and any(map(written_inputs, graphs)):
        return refusal("cuda-graphs-operator", "it writes to an input")
    for node in nodes:
        if (text := _of_call(node) if node.op == "call_function" else None) is not None:
            return refusal("cuda-graphs-operator", f"{text} ({node.name})")
    values = list(values_of(graphs))
    if any(map(_takes_numbers, graphs)):
        return refusal("cuda-graphs-dynamic", "it takes a number that is no size", "give it as a tensor")
    if any(map(is_symbolic, values)) and not (len(graphs) == 1 and _are_sizes_known(graphs[0])):
        return refusal("cuda-graphs-dynamic", "its inputs do not tell its sizes", "dynamic=False")
    if any(value.layout is not torch.strided for value in values):
        return refusal("cuda-graphs-layout", "it has tensors that are not strided")
    devices = {value.device for value in values}
    if others := sorted(str(device) for device in devices if device.type != device_type):
        return refusal("cuda-graphs-device", f"it has tensors on {', '.join(others)}")
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        return refusal("cuda-graphs-device", f"its tensors are on {found}, and not on one device")
    return None


def recorded_without(
    graph: fx.Graph, device_type: str, fails: Callable[[str], bool]
) -> Mapping[fx.Node, Reason]:
    """The calls that prevent the recording of a graph, with reasons. Empty if cutting them out does not help.

    Args:
        graph: the graph.
        device_type: the type of device that is recorded.
        fails: whether recording is known to fail for a custom operator of this name.
    """
    values = list(values_of([graph]))
    is_on_other_device = all(value.device.type != device_type for value in values)
    if is_on_other_device or _takes_numbers(graph) or any(map(is_symbolic, values)):
        return {}
    found: dict[fx.Node, Reason] = {}
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_constant_number(node, numbers):
            numbers.add(node)
        elif node.op == "call_function":
            if is_collective(node) or is_wait(node):
                return {}
            if (reason := _why_not_recorded(node, numbers, device_type, fails)) is not None:
                found[node] = reason
    return found


def _takes_numbers(graph: fx.Graph) -> bool:
    """Whether an input is neither a tensor nor None, nor a number that may be a size."""
    inputs = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return any(value is not None and not isinstance(value, (torch.Tensor, torch.SymInt)) for value in inputs)


def _are_sizes_known(graph: fx.Graph) -> bool:
    """Whether each symbol can be read from an input directly, and not only from an expression."""
    inputs = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    return frozenset[str]().union(*map(symbols_in, inputs)) <= places_of_symbols(inputs).keys()


def _why_not_recorded(
    node: fx.Node, numbers: Collection[fx.Node], device_type: str, fails: Callable[[str], bool]
) -> Reason | None:
    others = {
        str(value.device)
        for one in (node, *node.all_input_nodes)
        if one not in numbers
        for value in tensors_in(one.meta.get("val"))
        if value.device.type != device_type
    }
    if others:
        return _not_recordable("cuda-graphs-device", node, f"it has tensors on {', '.join(sorted(others))}")
    if (text := _of_call(node)) is not None:
        return _not_recordable("cuda-graphs-operator", node, text)
    if is_operator_overload(node.target) and fails(node.target.name()):
        return _not_recordable("cuda-graphs-failed", node, "it failed to be recorded")
    return None


def _not_recordable(code: str, node: fx.Node, text: str) -> Reason:
    name = node.target.name() if is_operator_overload(node.target) else node.name
    return Reason(
        code,
        f"a call is not recorded as a CUDA graph, but what stands around it is: {text} ({name})",
        "cudagraphs",
        way_out="nothing to do: results are the same",
    )


def values_of(graphs: Sequence[fx.Graph]) -> Iterator[torch.Tensor]:
    """The tensors in `graphs`. Skips constant scalars on the host, which kernels receive by value."""
    for graph in graphs:
        numbers: set[fx.Node] = set()
        for node in graph.nodes:
            if _is_constant_number(node, numbers):
                numbers.add(node)
            else:
                yield from tensors_in(node.meta.get("val"))


def _is_constant_number(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """Whether the value is a zero-dimensional CPU tensor, computed only from values in `known`, whose readers
    have finished with it when they return."""
    value = node.meta.get("val")
    return (
        node.op in ("get_attr", "call_function")
        and isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dim() == 0
        and all(given in known for given in node.all_input_nodes)
        and not has_effect(node)
        and not any(user.op == "output" or user.kwargs.get("non_blocking") for user in node.users)
    )


def refusal(code: str, text: str, way_out: str = "nothing to do: results are the same") -> Reason:
    """A reason for running without a CUDA graph."""
    return Reason(code, f"no CUDA graph is recorded: {text}", "cudagraphs", way_out=way_out)


def _of_call(node: fx.Node) -> str | None:
    if is_higher_order(node.target):
        return None if node.target.name() in _KERNELS else "it runs other graphs"  # type: ignore[union-attr]
    if is_random(node) and node.kwargs.get("generator") is not None:  # a replay advances the device's only
        return "it draws random numbers from a generator of its own"
    if depends_on_data(node) or torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
        return "what it does depends on values"
    if is_collective(node):
        return "it communicates"
    inputs = (value.op == "placeholder" for value in node.all_input_nodes)
    if is_mutating(node) and any(inputs) and not is_write_to_input(node):
        return "it writes to an input"
    return None
