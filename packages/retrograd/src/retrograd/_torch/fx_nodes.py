"""FX nodes made without what ``torch.fx.Graph.create_node`` does for graphs that are not our own.

In: the graph that is being written, and a call or a node to copy. Out: the node that ``create_node`` or
``node_copy`` would have made, with the same name in the same place. Left out are the search of the arguments
for symbolic numbers and the callbacks of a module that owns the graph: a deep model's backward has tens of
thousands of nodes, and these graphs have neither. Source: ``torch/fx/graph.py``, alike in 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg

__all__ = ["add_call", "add_copy", "add_placeholder"]

_NO_KWARGS: Any = immutable_dict()

#: what ``Graph._target_to_str`` makes of a function's name.
_bases: dict[str, str] = {}


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """Add a call of `target`; its node is called `name`, by default after the target."""
    if name is None:
        own = target.__name__
        name = _bases.get(own)
        if name is None:
            name = _bases[own] = graph._target_to_str(target)
    return _add(graph, "call_function", target, args, kwargs or _NO_KWARGS, name)


def add_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder at the insertion point; `name` is its target and its name."""
    return _add(graph, "placeholder", name, (), _NO_KWARGS, name)


def add_copy(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> fx.Node:
    """Add a copy of `node`, which may be of another graph, with a ``meta`` dictionary of its own.

    Args:
        graph: the graph. node: is copied. value_of: the values in `graph` for those that `node` reads.
    """
    kwargs = map_arg(node.kwargs, value_of) if node.kwargs else _NO_KWARGS
    copy = _add(graph, node.op, node.target, map_arg(node.args, value_of), kwargs, node.name)
    copy.meta.update(node.meta)
    return copy


def _add(graph: Any, op: str, target: Any, args: Any, kwargs: Any, candidate: str) -> fx.Node:
    names = graph._graph_namespace
    name = names.create_name(candidate, None)
    node = fx.Node(graph, name, op, target, args, kwargs)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
