"""FX nodes made without what ``torch.fx.Graph.create_node`` does for graphs that are not our own.

In: the graph that is being written, and a call or a node to copy. Out: the node that ``create_node`` or
``node_copy`` would have made, with the same name in the same place. Left out are the search of the arguments
for symbolic numbers and the callbacks of a module that owns the graph: a deep model's backward has tens of
thousands of nodes, and these graphs have neither. Source: ``torch/fx/graph.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg

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
    return _add(graph, "call_function", target, args, kwargs or _NO_KWARGS, _unused(graph, name))


def add_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder at the insertion point; `name` is its target and its name."""
    return _add(graph, "placeholder", name, (), _NO_KWARGS, _unused(graph, name))


def add_copy(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> fx.Node:
    """Add a copy of `node`, which may be of another graph, with a ``meta`` dictionary of its own.

    Args:
        graph: the graph. node: is copied. value_of: the values in `graph` for those that `node` reads.
    """
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of) if node.kwargs else _NO_KWARGS
    name, used = node.name, graph._graph_namespace._used_names
    if name in used:
        name = _unused(graph, name)
    used.add(name)
    copy = _add(graph, node.op, node.target, args, kwargs, name)
    copy.meta.update(node.meta)
    return copy


def _unused(graph: fx.Graph, candidate: str) -> str:
    """A name like `candidate` that no node of the graph has."""
    return graph._graph_namespace.create_name(candidate, None)


def _add(graph: Any, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
