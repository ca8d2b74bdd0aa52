"""A joint graph as text, with a role for each of its inputs and outputs.

In: the graph and its signature. Out: code for people, one call a line, the same under every torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from retrograd.graph.joint import JointSignature


def rendered(graph: fx.Graph, signature: JointSignature, sources: bool) -> str:
    """The text; `sources` puts the user's line before the first call that comes from it."""
    lines = ["def joint("]
    placeholders = graph.find_nodes(op="placeholder")
    lines += [
        f"    {_typed(node)},  # {role}" for node, role in zip(placeholders, signature.inputs, strict=True)
    ]
    lines.append("):")
    before = ""
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if sources and (source := _source(node)) not in ("", before):
            lines.append(f"    # {source}")
            before = source
        lines.append(f"    {_typed(node)} = {_call(node)}")
    lines.append("    return (")
    results: Any = graph.output_node().args[0]
    for value, role in zip(results, signature.outputs, strict=True):
        lines.append(f"        {value},  # {role}")
    return "\n".join([*lines, "    )"])


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    target: Any = node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    if name == "getitem":
        return f"{node.args[0]}[{node.args[1]}]"
    given = [_shown(value) for value in node.args]
    given += [f"{key}={_shown(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(given)})"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, fx.Node) else repr(value)


def _typed(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node.name
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{node.name}: {dtype}[{', '.join(map(str, value.shape))}]"


def _source(node: fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("File ")]
    return found[-1] if found else ""
