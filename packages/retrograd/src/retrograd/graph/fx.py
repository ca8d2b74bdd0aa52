"""FX graphs: create, copy and run nodes, and classify what an operator does besides returning a value.

In: graphs, calls and nodes. Out: whether a call has an effect (unknown calls do) or draws random numbers; new
nodes; modules whose Python code is generated on first use, because that takes as long as tracing.

Our node creation skips parts of ``torch.fx.Graph.create_node``: it does not search the arguments for symbolic
numbers, and does not call back into an owning module. A deep model's backward has tens of thousands of nodes,
and these graphs have neither. Names and order of the nodes are the same. Source: ``torch/fx/graph.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch._higher_order_ops.effects import _get_effect
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import _side_effectful_functions, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.facts import fact, functions
from retrograd.graph.emit import Boxed, boxed_calls
from retrograd.graph.joint import output_examples
from retrograd.graph.lazy import LazyGraph, Summary

_PURE_MODULES = frozenset({"_operator", "math"})
#: Functions of symbolic numbers.
SYMBOLIC = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("sym_"))
_WAIT = "_c10d_functional::wait_tensor"
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
#: Namespaces of torch's operators.
OF_TORCH = frozenset({"aten", "prim", "prims", "rngprims", "inductor", "quantized", *_COLLECTIVES})
DEPENDS_ON_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def is_operator_overload(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """True if the target is an operator with a schema, such as ``aten.add.Tensor``."""
    return isinstance(target, torch._ops.OpOverload)


#: ``meta`` key of a forward call of a joint graph: which of eager's saved tensors it computes
#: (`aot.droppable`).
SAVED_FOR = "saved_for"
#: ``meta`` key of a node of a joint graph: the regions for which eager saves its value or an alias of it.
KEPT_FOR = "kept_for"


def replace_by_equal(node: fx.Node, equal: fx.Node) -> None:
    """Replace all uses of `node` by `equal`, which has the same value."""
    node.replace_all_uses_with(equal)
    for key in (SAVED_FOR, KEPT_FOR):
        if meta_notes := node.meta.get(key):
            equal.meta[key] = (*equal.meta.get(key, ()), *meta_notes)


def schema_of(target: Any) -> Any:
    """The operator's schema: its ``arguments`` and ``returns``, each with its ``alias_info``."""
    return target._schema


def filled_in_place(operator: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `operator`, which fills its argument in place, on a new tensor laid out like `value`.

    The order in which numbers are drawn depends on the tensor's strides.
    """
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return operator(made, *args, **kwargs)


def fill_in_place(graph: fx.Graph) -> None:
    """Make the calls that were traced from in-place fills draw their numbers in the same order; changes
    `graph`."""
    for node in graph.nodes:
        if (operator := node.meta.get("fills_by")) is None:
            continue
        fill: Any = partial(filled_in_place, operator)
        if node.target is run_and_save_rng_state:
            node.args = (fill, *node.args[1:])
        elif node.target is run_with_rng_state:
            node.args = (node.args[0], fill, *node.args[2:])
        elif is_operator_overload(node.target) and is_random(node):
            node.target, node.args = filled_in_place, (operator, *node.args)


def is_higher_order(target: Any) -> bool:
    """True if the target is an operator that takes graphs or operators."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_mutating(node: fx.Node) -> bool:
    """True if the operator's schema declares a write to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_write_to_input(node: fx.Node) -> bool:
    """True if the call only writes elements into an input of the graph."""
    return node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def written_inputs(graph: fx.Graph) -> frozenset[int]:
    """Positions of the inputs to which `is_write_to_input` calls of `graph` write."""
    targets = {node.args[0] for node in graph.nodes if is_write_to_input(node)}
    return frozenset(i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in targets)


def is_random(node: fx.Node) -> bool:
    """True if the call, or one in a graph passed to it, draws random numbers.

    Attention without dropout does not, although its operator is tagged as random.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return any(is_random(inner) for inner in _inner_nodes(node))
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    return "dropout_p" not in names or bool(arguments_of(node).get("dropout_p", 0.0) != 0.0)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator call by the names of its schema, without defaults."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a call reads, one for each use."""
    operands: list[fx.Node] = []
    map_arg((node.args, node.kwargs), operands.append)
    return tuple(operands)


def draws_random_numbers(node: fx.Node) -> bool:
    """True if the call itself, not one in a graph passed to it, draws random numbers."""
    return is_operator_overload(node.target) and is_random(node)


def only_draws(node: fx.Node) -> bool:
    """True if drawing random numbers, or also saving the generator's state, is the call's only effect."""
    return draws_random_numbers(node) or node.target is run_and_save_rng_state


def random_devices(graph: fx.Graph) -> tuple[torch.device, ...]:
    """The devices from whose generators calls in `graph` draw."""
    return tuple({first_tensor(node.meta["val"]).device: None for node in filter(only_draws, graph.nodes)})


def lazy_graph(gm: fx.GraphModule, inputs: Sequence[Any] | None = None) -> LazyGraph:
    """`gm`, which must not change any more, as a `LazyGraph`. `inputs` replace its example inputs if
    given."""

    return LazyGraph(lambda: gm, partial(_summary_of, gm, inputs))


def _summary_of(gm: fx.GraphModule, inputs: Sequence[Any] | None) -> Summary:
    placeholders = gm.graph.find_nodes(op="placeholder")
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    effects = list(filter(has_effect, calls))
    return Summary(
        tuple(node.name for node in placeholders),
        tuple((node.meta.get("val") for node in placeholders) if inputs is None else inputs),
        tuple(output_examples(gm.graph)),
        len(calls),
        frozenset(str(call.target) for call in calls if is_operator_overload(call.target)),
        random_devices(gm.graph),
        not all(only_draws(effect) or fact("raises", effect.target) == "only" for effect in effects),
    )


def first_tensor(value: Any) -> Any:
    """The first tensor in an example value."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


def has_effect(node: fx.Node) -> bool:
    """True if removing, duplicating or moving the call could be observed other than through its value.

    Drawing random numbers is such an effect: it advances the generator.
    """
    target = node.target
    if node.op != "call_function":
        return node.op not in ("placeholder", "get_attr", "output")
    if target in _side_effectful_functions:
        return True
    if isinstance(target, torch._ops.OpOverload):
        raises = fact("raises", target) == "only"
        return raises or _get_effect(target) is not None or is_mutating(node) or is_random(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _has_effect_in_higher_order(node, target)
    return getattr(target, "__module__", "") not in _PURE_MODULES and target not in SYMBOLIC


def _has_effect_in_higher_order(node: fx.Node, target: Any) -> bool:
    known = *functions("self_contained"), *functions("pure")
    if target.name() not in known or _get_effect(target) is not None:
        return True
    operators = [arg for arg in node.args if isinstance(arg, torch._ops.OpOverload)]
    if any(op in _side_effectful_functions or _get_effect(op) is not None for op in operators):
        return True
    return any(has_effect(inner) for inner in _inner_nodes(node))


def _inner_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes of the graphs passed to the call."""
    owner = node.graph.owning_module
    names = [str(value.target) for value in node.all_input_nodes if value.op == "get_attr"]
    if owner is None or not is_higher_order(node.target):
        return []
    graphs = [operator.attrgetter(name)(owner) for name in names]
    return [inner for graph in graphs if isinstance(graph, fx.GraphModule) for inner in graph.graph.nodes]


def reads_memory(node: fx.Node) -> bool:
    """True if the call depends on its argument's strides: given a copy with other strides, it reads other
    elements."""
    return "as_strided" in str(getattr(node.target, "__name__", ""))


def depends_on_data(node: fx.Node) -> bool:
    """True if the call returns sizes or numbers that are unknown before it runs.

    Torch tags an operator if that is possible: indexing by a mask has an unknown size, indexing by integers a
    known one.
    """
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or DEPENDS_ON_DATA.isdisjoint(target.tags):
        return False
    return not isinstance(value, torch.Tensor) or bool(free_unbacked_symbols(value))


def is_collective(node: fx.Node) -> bool:
    """True if the call starts communication that a ``wait_tensor`` completes."""
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVES
    return known and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    """True if the call waits for communication."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == _WAIT


@contextmanager
def real_tensors() -> Iterator[None]:
    """Inside, compute on real tensors without autograd, whatever modes are active."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph`."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = add_copy(copy, node, made.__getitem__)
    return copy


def copied_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm`. Tensors and submodules are shared, ``meta`` dictionaries are copied."""
    copy = lazy_graph_module(gm, copied(gm.graph), "joint")
    copy.meta = dict(gm.meta)
    return copy


def boxed(gm: fx.GraphModule) -> Boxed:
    """A function that runs the current graph of `gm`."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    *calls, output = [node for node in gm.graph.nodes if node.op != "placeholder"]
    return boxed_calls(inputs, calls, output.args[0], gm)


def lazily() -> AbstractContextManager[None]:
    """Inside, torch's own functions make modules whose code is generated on first use."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def lazy_graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A module for `graph` with the constants of `root`. Its code is generated on first use."""
    with lazily():
        return _make_graph_module(root, graph, name)


_NO_KWARGS: Any = immutable_dict()

#: Cache: the result of ``Graph._target_to_str`` by a function's name.
_bases: dict[str, str] = {}


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """Add a call of `target`. The node is called `name`, or named after the target."""
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
    """Add a copy of `node`, which may be from another graph. The ``meta`` dictionary is copied."""
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
    """A name like `candidate` that is unused in the graph."""
    return graph._graph_namespace.create_name(candidate, None)


def _add(graph: Any, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def with_strides(run: Boxed, fakes: Sequence[Any]) -> Boxed:
    """Wrap `run` so that its results have the strides of `fakes`, where these are static.

    A code generator may pad a matrix product and return a slice of it. The first call shows which results
    need a copy.
    """
    places: list[int] | None = None

    def run_with_strides(args: list[Any]) -> Sequence[Any]:
        nonlocal places
        results = run(args)
        if places is None:
            places = [i for i, fake in enumerate(fakes) if has_other_strides(results[i], fake)]
        if not places:
            return results
        made = [*results]
        for i in places:
            made[i] = made[i].new_empty_strided(made[i].shape, fakes[i].stride()).copy_(made[i])
        return made

    return run_with_strides


def with_strides_of(run: Boxed, results: Sequence[Any]) -> Boxed:
    """Wrap `run` so that its results have the strides of `results`."""

    def form(result: Any) -> torch.Tensor | None:
        if type(result) is not torch.Tensor:
            return None
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")

    return with_strides(run, [form(result) for result in results])


def is_symbolic(fake: torch.Tensor) -> bool:
    """True if a size or a stride is symbolic."""
    return bool(fake._has_symbolic_sizes_strides)


def has_other_strides(value: Any, fake: Any) -> bool:
    """True if `value` has the sizes of `fake`, which are static, and other strides."""
    if not isinstance(fake, torch.Tensor) or not isinstance(value, torch.Tensor) or is_symbolic(fake):
        return False
    return fake.shape == value.shape and fake.stride() != value.stride()
