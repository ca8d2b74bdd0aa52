"""A `BackwardGraph` as text that a person reads.

In: a `BackwardGraph`. Out: one line per call, grouped by node call, with short names; or, with its
`Schedule`, one line per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrograd.graph.backward_graph import BackwardGraph, call_of
from retrograd.graph.schedule import OpaqueCall, PlanStep, Schedule, Segment


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
        calls = dict.fromkeys(call_of(node).node_call for node in _step_nodes(step))
        names = ", ".join(map(backward.node_name, calls))
        source = "" if isinstance(step, Segment) else backward.node_calls[call_of(step.node).node_call].source
        lines.append(f"{number:4d}  {_step_kind(step, segments)} {names}" + (f"  {source}" if source else ""))
    return "\n".join(lines)


def _step_nodes(step: PlanStep) -> tuple[fx.Node, ...]:
    return step.nodes if isinstance(step, Segment) else (step.node,)


def _step_kind(step: PlanStep, segments: dict[Segment, int]) -> str:
    if isinstance(step, Segment):
        return f"segment {segments[step]}:"
    return f"{step.reason} at" if isinstance(step, OpaqueCall) else "accumulation:"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    return repr(value)


def _sequence(values: Sequence[Any]) -> str:
    inner = ", ".join(map(_argument, values))
    return f"[{inner}]" if isinstance(values, list) else f"({inner}{',' if len(values) == 1 else ''})"
