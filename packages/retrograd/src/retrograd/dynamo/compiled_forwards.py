"""Differentiates the backward of a function that stock ``torch.compile`` compiled, which stock refuses.

In: the graphs that Dynamo hands to its backends, and the Functions that AOTAutograd makes from them. We see
those that are made after the first context was created. Out: a Function with another backward. If the
backward itself must be differentiable (``create_graph=True``) and a context is active, it runs the function's
torch-level graph again on the same inputs, and differentiates that, to any order. Otherwise nothing changes.

We hold the inputs weakly, so that nothing lives longer. Stock still raises its error if an input was freed or
changed, or if the graph draws random numbers, changes its inputs or calls an ``autograd.Function``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from retrograd.engine import versions_of
from retrograd.facts.patches import handle
from retrograd.facts.releases import gradients_of
from retrograd.graph.fx import copied_module
from retrograd.process import ThreadValue
from retrograd.runtime.modes import generator_states, restore_generator_states
from retrograd.runtime.tensor import zeros_of_slot

#: the graph that Dynamo is compiling on this thread, until a Function is made from it
_compiling: ThreadValue[fx.GraphModule | None] = ThreadValue(None)


class _Inputs:
    """The inputs of one call of a compiled function. We hold tensors weakly."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.values = [weakref.ref(a) if isinstance(a, torch.Tensor) else a for a in args]
        self.versions = versions_of(args)

    def unchanged(self) -> list[Any] | None:
        """The inputs; None if one was freed, or changed in place since."""
        values = [v() if isinstance(v, weakref.ref) else v for v in self.values]
        known = all(
            value is not None and (version is None or value._version == version)
            for value, version in zip(values, self.versions, strict=True)
        )
        return values if known else None


def watch_compiled_forwards(is_active: Callable[[], bool]) -> None:
    """From now on, see each compiled function that is made. A forward is often compiled before the context
    around its backward is entered. `is_active` says whether a context is active in any thread."""

    def made_function(
        original: Callable[..., None], cls: Any, name: str, bases: Any, attrs: dict[str, Any]
    ) -> None:
        graph = _compiling.get()
        if graph is not None and "_lazy_backward_info" in attrs:
            _compiling.set(None)  # a second Function of one graph holds an unknown part of it
            _make_differentiable(cls, attrs, graph, is_active)
        original(cls, name, bases, attrs)

    handle("torch._dynamo.output_graph:OutputGraph.call_user_compiler", _compiling_graph)
    handle("torch.autograd.function:FunctionMeta.__init__", made_function)


def _compiling_graph(original: Callable[..., Any], output: Any, gm: fx.GraphModule, *args: Any) -> Any:
    with _compiling.switched(copied_module(gm)):  # because backends rewrite it
        return original(output, gm, *args)


def _make_differentiable(
    cls: Any, attrs: dict[str, Any], graph: fx.GraphModule, is_active: Callable[[], bool]
) -> None:
    """Make the Function `cls` store its inputs, and differentiate `graph` on request."""
    forward, backward = attrs["forward"].__func__, attrs["backward"].__func__

    def forward_that_remembers(ctx: Any, *args: Any) -> Any:
        result = forward(ctx, *args)
        ctx._retrograd_inputs = _Inputs(args)
        ctx.set_materialize_grads(False)  # so that undefined gradients arrive as None
        return result

    def backward_with_graph(ctx: Any, *grads: Any) -> Any:
        flat, boxed = gradients_of(grads)
        if torch.is_grad_enabled() and is_active():
            result = _differentiate(graph, cls.metadata, ctx._retrograd_inputs, flat)
            if result is not None:
                return result
        for i, grad in enumerate(flat):
            if grad is None:
                flat[i] = zeros_of_slot(ctx, i)()
        return backward(ctx, flat) if boxed else backward(ctx, *flat)

    cls.forward = staticmethod(forward_that_remembers)
    cls.backward = staticmethod(backward_with_graph)


def _differentiate(
    graph: fx.GraphModule, metadata: Any, inputs: _Inputs, grads: Sequence[torch.Tensor | None]
) -> tuple[Any, ...] | None:
    """The gradients of the inputs, with their history; None if the graph alone does not determine them."""
    values = inputs.unchanged()
    if values is None or not _is_repeatable(graph, metadata, len(values)):
        return None
    devices = {v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"}
    before = generator_states([torch.device("cpu"), *devices])
    with torch.enable_grad():
        outputs = torch.utils._pytree.tree_leaves(graph(*values))
    now = generator_states(before)
    if not all(torch.equal(now[device], before[device]) for device in before):
        restore_generator_states(before)  # the numbers differ from those that the Function has drawn
        return None
    if len(outputs) != len(grads):
        return None
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
    ]
    wanted = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        [values[i] for i in wanted],
        [grad for _, grad in pairs],
        create_graph=True,
        allow_unused=True,
    )
    gradients = dict(zip(wanted, found, strict=True))
    return tuple(gradients.get(i) for i in range(len(values)))


def _is_repeatable(graph: fx.GraphModule, metadata: Any, n_inputs: int) -> bool:
    """Whether `graph` can be run again: it changes no input, returns what the Function returned, and leaves
    the history that the program would leave. For an ``autograd.Function``, Dynamo keeps only the first
    derivative."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    called = {getattr(node.target, "__name__", "") for module in modules for node in module.graph.nodes}
    return (
        len(placeholders) == n_inputs
        and "autograd_function_apply" not in called
        and not metadata.num_intermediate_bases
        and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
    )
