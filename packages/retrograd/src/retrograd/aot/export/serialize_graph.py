"""A graph of ATen calls as plain data, and back.

In: a graph module. Out: JSON values, one entry a node, and the tensors that the graph holds; of those, the
graph again, with example values computed by running it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.trace import know_values
from retrograd.aot.export.serialize_values import (
    read_operator,
    read_value,
    serialize_operator,
    serialize_value,
)
from retrograd.errors import ExportError, Refusal

_PLAIN = (bool, int, str, CheckpointPolicy)


def serialize_graph(gm: fx.GraphModule, tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
    """The nodes of `gm`; tensors that it holds are added to `tensors`.

    Raises:
        ExportError: a node that cannot be written.
    """
    modules: dict[str, Any] = {}
    nodes = []
    for node in gm.graph.nodes:
        try:
            entry: dict[str, Any] = {"op": node.op, "name": node.name}
            if node.op == "call_function":
                entry["target"] = serialize_operator(node.target)
            elif node.op == "get_attr":
                _write_attribute(gm, node, (tensors, prefix, modules))
                entry["target"] = node.target
            elif node.op not in ("placeholder", "output"):
                raise Refusal("unwritable", f"a node of kind {node.op}")
            if node.op != "placeholder":
                entry["args"] = [serialize_value(value) for value in node.args]
                entry["kwargs"] = {key: serialize_value(value) for key, value in node.kwargs.items()}
            entry["meta"] = {
                key: serialize_value(value) for key, value in node.meta.items() if isinstance(value, _PLAIN)
            }
        except Refusal as error:
            raise ExportError.because(
                "graph",
                f"the graph holds {error}",
                "aot.export",
                node=f"{node.name} ({node.target})",
                way_out="replace the call by one of an operator",
            ) from error
        nodes.append(entry)
    return {"nodes": nodes, "modules": modules}


def _write_attribute(
    gm: fx.GraphModule, node: fx.Node, to: tuple[dict[str, torch.Tensor], str, dict[str, Any]]
) -> None:
    tensors, prefix, modules = to
    name = str(node.target)
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule) and "." not in name:
        modules[name] = serialize_graph(value, tensors, f"{prefix}{name}/")
    elif type(value) in (torch.Tensor, torch.nn.Parameter) and "." not in name:
        tensors[prefix + name] = value.detach()
    else:
        raise Refusal("unwritable", f"the attribute {name}, a {type(value).__name__},")


def read_graph(
    written: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    examples: Sequence[Any] | None,
    prefix: str = "",
) -> fx.GraphModule:
    """What `serialize_graph` wrote.

    Args:
        written, tensors: from there.
        examples: a value for each placeholder, fake or a symbolic number; None to compute no values.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
        Exception: whatever an operator raises on fake tensors.
    """
    root = torch.nn.Module()
    for name, inner in written["modules"].items():
        root.add_module(name, read_graph(inner, tensors, None, f"{prefix}{name}/"))
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for entry in written["nodes"]:
        nodes[entry["name"]] = _read_node(graph, entry, nodes)
        if entry["op"] == "get_attr" and entry["target"] not in written["modules"]:
            root.register_buffer(entry["target"], tensors[prefix + entry["target"]])
    gm = fx.GraphModule(root, graph, "joint")
    return gm if examples is None else know_values(gm, examples)


def _read_node(graph: fx.Graph, entry: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> fx.Node:
    kind, name = entry["op"], entry["name"]
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a node")
    if kind == "placeholder":
        node = graph.placeholder(name)
    else:
        args = tuple(read_value(value, nodes) for value in entry["args"])
        kwargs = {key: read_value(value, nodes) for key, value in entry["kwargs"].items()}
        if kind == "output":
            node = graph.output(*args)
        elif kind == "call_function":
            node = graph.call_function(read_operator(entry["target"]), args, kwargs)
        elif kind == "get_attr" and entry["target"].isidentifier():
            node = graph.create_node("get_attr", entry["target"], name=name)
        else:
            raise ValueError(f"a node of unknown kind {kind!r}")
    node.name = name
    node.meta.update({key: read_value(value, {}) for key, value in entry["meta"].items()})
    return node
