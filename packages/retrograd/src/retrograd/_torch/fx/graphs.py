"""FX graphs as they are written, copied, and run.

In: graphs, calls and nodes. Out: nodes, without what ``torch.fx.Graph.create_node`` does for graphs that are
not our own, but with the same name in the same place; modules whose Python code is written when it is first
asked for, because that takes as long as tracing; functions that take their inputs as one list and let each go
after its last use. Left out of ``create_node`` are the search of the arguments for symbolic numbers and the
callbacks of a module that owns the graph: a deep model's backward has tens of thousands of nodes, and these
graphs have neither. Source: ``torch/fx/graph.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg

from retrograd.graph.emit import Boxed, boxed_calls


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph`."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = add_copy(copy, node, made.__getitem__)
    return copy


def copied_module(
    gm: fx.GraphModule, module: Callable[[nn.Module, fx.Graph, str], fx.GraphModule] = fx.GraphModule
) -> fx.GraphModule:
    """A copy of `gm`, made by `module`; tensors and submodules are shared, ``meta`` dictionaries are not."""
    copy = module(gm, copied(gm.graph), "joint")
    copy.meta = dict(gm.meta)
    return copy


def boxed(gm: fx.GraphModule) -> Boxed:
    """A function that runs the graph of `gm`, as it is now."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    *calls, output = [node for node in gm.graph.nodes if node.op != "placeholder"]
    return boxed_calls(inputs, calls, output.args[0], gm)


def lazily() -> AbstractContextManager[None]:
    """Inside, torch's own functions make such modules."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def lazy_graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A module of `graph`, with the constants of `root`."""
    with lazily():
        return _make_graph_module(root, graph, name)


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


def with_strides(run: Boxed, fakes: Sequence[Any]) -> Boxed:
    """`run`, whose results have the strides of `fakes`, where these are static: a code generator may pad a
    matrix product and give a slice of it. The first call shows with which results it does so."""
    places: list[int] | None = None

    def run_with_strides(args: list[Any]) -> Sequence[Any]:
        nonlocal places
        results = run(args)
        if places is None:
            places = [i for i, fake in enumerate(fakes) if _differs(fake, results[i])]
        if not places:
            return results
        made = [*results]
        for i in places:
            made[i] = torch.empty_strided(
                made[i].shape, fakes[i].stride(), dtype=made[i].dtype, device=made[i].device
            ).copy_(made[i])
        return made

    return run_with_strides


def is_symbolic(fake: torch.Tensor) -> bool:
    """Whether a size or a stride is symbolic."""
    strides = fake.stride() if fake.layout is torch.strided else ()
    return any(isinstance(number, torch.SymInt) for number in (*fake.shape, *strides))


def _differs(fake: Any, result: Any) -> bool:
    if not isinstance(fake, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if is_symbolic(fake):
        return False
    return fake.shape == result.shape and fake.stride() != result.stride()
