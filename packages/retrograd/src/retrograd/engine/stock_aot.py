"""Reads the backward graph that stock AOTAutograd stored on the context of a compiled function.

In: the context of such a function, which is the autograd node. Out: `AotBackward`, or a `Refusal` with the
reason why the function should run this backward itself. Source:
``torch/_functorch/_aot_autograd/runtime_wrappers.py``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.compiled_autograd  # first: it and the next import one another
from torch import fx
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch._functorch._aot_autograd.subclass_utils import wrap_tensor_subclasses
from torch._subclasses.fake_tensor import unset_fake_temporarily

from retrograd.errors import Refusal
from retrograd.facts.releases import wants_gradient
from retrograd.graph.backward_graph import AotBackward, BuiltGradient, Tangent


def is_aot_node(node: Any) -> bool:
    """Whether an autograd node is the context of a forward that AOTAutograd compiled."""
    function = getattr(node, "_forward_cls", None)
    return hasattr(function, "_aot_id") and hasattr(function, "_lazy_backward_info")


def tensors_on_context(ctx: Any) -> list[torch.Tensor]:
    """Saved tensors that AOTAutograd stores on the context, without version checks."""
    return list(getattr(ctx, "_tensors_no_vc_check", ()))


def read_aot_backward(ctx: Any) -> AotBackward:
    """Read the backward graph of `ctx`."""
    compiled = ctx._forward_cls
    metadata = compiled.metadata
    module = _module(compiled)
    for reason in _obstacles(module, metadata):
        raise Refusal("not-inlined", reason)
    return AotBackward(
        name=f"aot{compiled._aot_id}",
        graph=module.graph,
        constants={
            node.target: operator.attrgetter(node.target)(module)
            for node in module.graph.nodes
            if node.op == "get_attr"
        },
        tangents=_tangents(metadata),
        gradients=_gradients(module, compiled),
        kept_on_context=len(tensors_on_context(ctx)),
    )


def _module(compiled: Any) -> fx.GraphModule:
    info = compiled._lazy_backward_info
    module = getattr(info, "bw_module", None)
    if module is None and hasattr(info, "bw_module_fn"):
        module = _loaded(info.bw_module_fn)
    if not isinstance(module, fx.GraphModule):
        raise Refusal("not-inlined", "its backward was compiled without keeping the graph")
    return module


def _loaded(load: Callable[[], Any]) -> Any:
    """Load a graph from AOTAutograd's cache. Loading runs the graph once, which turns random numbers, among
    others, into constants. So we load it with two seeds and compare the constants."""

    def seeded(seed: int) -> Any:
        with unset_fake_temporarily(), torch.random.fork_rng():
            torch.manual_seed(seed)
            return load()

    first, second = seeded(1), seeded(2)
    if isinstance(first, fx.GraphModule):
        constants = zip(first.buffers(), second.buffers(), strict=True)
        if not all(torch.equal(one, two) for one, two in constants):
            raise Refusal("not-inlined", "its graph, as AOTAutograd's cache keeps it, draws random numbers")
    return first


def _obstacles(module: fx.GraphModule, metadata: Any) -> Iterator[str]:
    """The reasons why the graph cannot be inlined into another one."""
    if metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states:
        yield "it replays random numbers of the forward from saved generator states"
    if metadata.num_backward_tokens:
        yield "it orders side effects by tokens"
    if metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw:
        yield "it changes an input of the forward in place"
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{node.op} {node.target} in its graph"
        elif node.op == "call_function":
            yield from _obstacles_of_call(node)


def _obstacles_of_call(node: fx.Node) -> Iterator[str]:
    target = node.target
    name = getattr(target, "__name__", str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        if name in _EFFECTS:
            yield f"{name} in its graph"
    elif isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            yield f"{target} in its graph changes a tensor in place"
        elif torch.Tag.nondeterministic_seeded in target.tags or "inductor_lookup_seed" in str(target):
            yield f"{target} in its graph draws random numbers"
        elif target is torch.ops.aten.as_strided.default and node.all_input_nodes[0].op == "placeholder":
            yield "as_strided of a saved tensor, whose strides the compiled forward may have chosen otherwise"
    elif getattr(target, "__module__", "") not in _PURE_MODULES:
        yield f"call of {name} in its graph"


_EFFECTS = frozenset(
    {
        "with_effects",
        "run_with_rng_state",
        "run_and_save_rng_state",
        "graphsafe_run_with_rng_state",
        "triton_kernel_wrapper_mutation",
    }
)
#: The modules of size arithmetic and of ``getitem``, which selects results.
_PURE_MODULES = frozenset({"_operator", "operator", "math", "torch", "torch.utils._sympy.functions"})


# tangents


def _tangents(metadata: Any) -> tuple[Tangent, ...]:
    metas = metadata.subclass_tangent_meta
    slots = _slots_with_tangent(metadata)
    if len(slots) != len(metas):
        raise Refusal("not-inlined", f"it takes {len(metas)} tangents, {len(slots)} outputs have one")
    pairs = zip(slots, metas, strict=True)
    return tuple(Tangent(slot, _leaves(meta), functools.partial(_read_tangent, meta)) for slot, meta in pairs)


def _slots_with_tangent(metadata: Any) -> list[int]:
    """The forward's outputs whose gradients enter the graph. These are, in order, mutated inputs, results,
    and the bases of results that are views."""
    changed = [
        i
        for i, index in enumerate(metadata.mutated_inp_runtime_indices)
        if metadata.input_info[index].mutates_data and metadata.input_info[index].requires_grad
    ]
    first = len(metadata.mutated_inp_runtime_indices)
    results = [first + i for i, info in enumerate(metadata.output_info) if _has_tangent(info)]
    first += len(metadata.output_info)
    return [*changed, *results, *range(first, first + metadata.num_intermediate_bases)]


def _has_tangent(info: Any) -> bool:
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    return info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and wants_gradient(info)


def _leaves(meta: Any) -> int:
    inner = getattr(meta, "attrs", None)
    return 1 if inner is None else sum(map(_leaves, inner.values()))


def _read_tangent(meta: Any, grad: Any) -> list[Any]:
    leaves: list[Any] = runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent(grad, meta)[1]
    return leaves


# gradients


def _gradients(module: fx.GraphModule, compiled: Any) -> tuple[Any, ...]:
    """The function's return values, in terms of the graph's nodes."""
    outputs = list(next(iter(reversed(module.graph.nodes))).args[0])
    subclasses = compiled.maybe_subclass_metadata
    if subclasses is None:
        return tuple(output if isinstance(output, fx.Node) else None for output in outputs)
    return tuple(
        wrap_tensor_subclasses(
            outputs,
            subclass_metas=subclasses.grad_input_metas,
            included_subclass_symints=True,
            is_runtime=True,
            make_subclass_override=_built,
        )
    )


def _built(meta: SubclassCreationMeta, is_runtime: bool, outputs: Any) -> BuiltGradient:
    first = meta.flat_tensor_start_idx
    parts = tuple(outputs[first : first + meta.arg_count])

    def build(*parts: Any) -> Any:
        return meta.creation_fn([None] * first + list(parts), is_runtime=is_runtime)

    return BuiltGradient(parts, build)
