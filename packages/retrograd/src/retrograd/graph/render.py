"""Graphs as text that a person reads.

In: a `BackwardGraph`, or a joint graph and its signature. Out: one line per call, with short names, under
every torch the same: grouped by node call; or, with its `Schedule`, one line per step; or with a role for
each input and output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from retrograd.graph.backward_graph import BackwardGraph, OpaqueCall, Schedule, Segment, call_of
from retrograd.graph.joint import JointSignature


def readable(backward: BackwardGraph) -> str:
    """The calls in order, each group under the autograd node that it belongs to."""
    lines: list[str] = [f"backward({', '.join(node.name for node, _ in backward.placeholders())}):"]
    current = None
    for node, call in backward.calls():
        if call.node_call != current:
            current = call.node_call
            source = backward.node_calls[current].source
            lines.append(f"  # {backward.node_name(current)}" + (f"  {source}" if source else ""))
        target = getattr(node.target, "__name__", str(node.target))
        kind = f"  # {call.hook.value}" if call.hook else ""
        lines.append(f"    {node.name} = {target}({', '.join(map(_argument, node.args))}){kind}")
    outputs = ", ".join("None" if node is None else node.name for node in backward.outputs())
    lines.append(f"  return ({outputs})")
    return "\n".join(lines)


def readable_schedule(backward: BackwardGraph, schedule: Schedule) -> str:
    """The steps in order: which node calls each segment holds, and what each opaque call is."""
    segments = {step: number for number, step in enumerate(schedule.segments)}
    lines = []
    for number, step in enumerate(schedule.steps):
        if isinstance(step, Segment):
            kind, nodes, source = f"segment {segments[step]}:", step.nodes, ""
        else:
            kind = f"{step.reason} at" if isinstance(step, OpaqueCall) else "accumulation:"
            nodes, source = (step.node,), backward.node_calls[call_of(step.node).node_call].source
        calls = dict.fromkeys(call_of(node).node_call for node in nodes)
        names = ", ".join(map(backward.node_name, calls))
        lines.append(f"{number:4d}  {kind} {names}" + (f"  {source}" if source else ""))
    return "\n".join(lines)


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if not isinstance(value, (list, tuple)):
        return repr(value)
    inner = ", ".join(map(_argument, value))
    return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"


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
