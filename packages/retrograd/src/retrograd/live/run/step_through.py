"""Run a captured segment one call at a time, with something around each call.

In: the segment, its values, and a context manager per call. Out: the segment's outputs. Slower
than the graph's generated code, so it is used only to trace and under a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from retrograd.graph.backward_graph import Segment
from retrograd.graph.emit import last_uses

Around = Callable[[fx.Node], AbstractContextManager[Any]]


def step_through(segment: Segment, args: list[Any], around: Around) -> tuple[Any, ...]:
    """The outputs of `segment`; `args` is emptied, and values are let go after their last use."""
    values = dict(zip(segment.inputs, args, strict=True))
    args.clear()
    reads = [(i, (node, *node.all_input_nodes)) for i, node in enumerate(segment.nodes)]
    dying = last_uses([*reads, (len(reads), segment.outputs)])
    for i, node in enumerate(segment.nodes):
        with around(node):
            args, kwargs = argument_values((node.args, node.kwargs), values)
            assert callable(node.target)
            values[node] = node.target(*args, **kwargs)
            del args, kwargs
        for value in dying.get(i, ()):
            del values[value]
    return tuple(values[node] for node in segment.outputs)


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
