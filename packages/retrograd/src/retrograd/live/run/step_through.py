"""Run a captured segment one call at a time, with something around each call.

In: the segment as a graph, its values, and a context manager per call. Out: the segment's outputs. Slower
than the graph's generated code, so it is used only to trace and under a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

Around = Callable[[fx.Node], AbstractContextManager[Any]]


def step_through(graph: fx.Graph, args: list[Any], around: Around) -> tuple[Any, ...]:
    """The outputs of `graph`; `args` is emptied, and values are let go after their last use."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, args, strict=True))
    args.clear()
    dying = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            with around(node):
                args, kwargs = argument_values((node.args, node.kwargs), values)
                values[node] = node.target(*args, **kwargs)
        elif node.op == "output":
            return tuple(argument_values(item, values) for item in node.args[0])
        for value in dying.get(node, ()):
            del values[value]
    raise AssertionError("a segment's graph has an output")


def argument_values(argument: Any, values: dict[fx.Node, Any]) -> Any:
    """An FX argument with values for its nodes, in plain lists and tuples."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [argument_values(item, values) for item in argument]
    if isinstance(argument, tuple):
        return tuple(argument_values(item, values) for item in argument)
    if isinstance(argument, dict):
        return {name: argument_values(item, values) for name, item in argument.items()}
    return argument


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each call, the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if node.op == "call_function":
            dying.setdefault(node, []).append(value)
    return dying
