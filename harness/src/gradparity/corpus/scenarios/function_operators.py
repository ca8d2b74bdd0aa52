"""Custom operators and their gradients: `torch.library.custom_op` with `register_autograd`.

In: a probe. Out: what the registered backward is given, and the gradients of every input.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@torch.library.custom_op("gradparity::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, factor: float) -> Tensor:
    """Sine of x times a factor."""
    return x.sin() * factor


def _save_x(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.factor = inputs
    ctx.save_for_backward(x)


def _scaled_sine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * x.cos() * ctx.factor, None


scaled_sine.register_autograd(_scaled_sine_backward, setup_context=_save_x)


@torch.library.custom_op("gradparity::blend", mutates_args=())
def blend(tensors: list[Tensor], weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of the tensors, weighted, and the largest value (which nobody differentiates)."""
    factors = torch.ones(len(tensors), dtype=tensors[0].dtype) if weights is None else weights
    total = torch.stack([t * f for t, f in zip(tensors, factors, strict=True)]).sum(0)
    return total, total.max().clone()


def _save_blend(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, weights = inputs
    ctx.count = len(tensors)
    ctx.weighted = weights is not None
    ctx.save_for_backward(*tensors, *([weights] if weights is not None else []))


def _blend_backward(ctx: Any, grad: Tensor, grad_of_max: Tensor) -> tuple[list[Tensor], Tensor | None]:
    saved = ctx.saved_tensors
    if not ctx.weighted:
        return [grad + grad_of_max for _ in range(ctx.count)], None
    *tensors, weights = saved
    return [grad * w for w in weights], torch.stack([(grad * t).sum() for t in tensors])


blend.register_autograd(_blend_backward, setup_context=_save_blend)


@torch.library.custom_op("gradparity::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    """Add one in place."""
    x.add_(1)


@torch.library.custom_op("gradparity::no_gradient", mutates_args=())
def no_gradient(x: Tensor) -> Tensor:
    """An operator without a registered gradient."""
    return x * 2


@torch.library.custom_op("gradparity::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows, which end where `ends` says, with one matrix each, as experts make them."""
    found = rows.new_zeros(len(rows), weights.shape[2])
    for (start, end), weight in zip(pairwise([0, *ends.tolist()]), weights, strict=True):
        found[start:end] = rows[start:end] @ weight
    return found


grouped_product.register_fake(lambda rows, weights, ends: rows.new_empty(rows.shape[0], weights.shape[2]))


def _grouped_product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    by_rows, by_weights, places = torch.zeros_like(rows), torch.zeros_like(weights), [0, *ends.tolist()]
    for i, (start, end) in enumerate(pairwise(places)):
        by_rows[start:end] = grad[start:end] @ weights[i].T
        by_weights[i] = rows[start:end].T @ grad[start:end]
    return by_rows, by_weights, None


grouped_product.register_autograd(
    _grouped_product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@scenario(tags=("compiled", "function", "operator"))
def compiled_operator_whose_backward_looks_at_values(p: Probe) -> None:
    """Between other calls stands an operator whose backward reads numbers out of a tensor."""
    rows = p.leaf("rows", p.randn(6, 4, requires_grad=True))
    weights = p.leaf("weights", p.randn(3, 4, 5, requires_grad=True))

    def experts(ends: Tensor) -> Tensor:
        mixed = grouped_product(rows.tanh() * 2, weights.exp(), ends)
        return grouped_product(weights=weights.sin(), rows=mixed.cos()[:, 1:], ends=ends)

    run = p.compile(experts)
    for ends in ([2, 3, 6], [0, 5, 6]):
        out = run(torch.tensor(ends))
        out.register_hook(p.hook("out"))
        with p.backward():
            out.square().sum().backward()


@scenario(tags=("function", "operator"))
def custom_operator_with_a_gradient(p: Probe) -> None:
    """A custom operator's backward is a Function of torch's own; hooks stand around it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for factor in (0.5, 2.0):
        y = scaled_sine(x * 2, factor)
        y.register_hook(p.hook("y"))
        with p.backward():
            (y * x).sum().backward()


@scenario(tags=("function", "operator"))
def custom_operator_on_a_list(p: Probe) -> None:
    """An operator on a list of tensors and an optional one gives a gradient to each of them."""
    tensors = [p.leaf(f"x{i}", p.randn(3, requires_grad=True)) for i in range(3)]
    weights = p.leaf("weights", p.randn(3, requires_grad=True))
    with p.backward():
        blend([t.sin() for t in tensors], weights)[0].pow(2).sum().backward()
        total, largest = blend(tensors, None)
        (total.sum() + largest).backward()
        blend(tensors, None)[0].sum().backward()


@scenario(tags=("function", "operator", "higher-order"))
def custom_operator_differentiated_twice(p: Probe) -> None:
    """The gradient of a custom operator can be differentiated again."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (first,) = torch.autograd.grad(scaled_sine(x, 3.0).sum(), x, create_graph=True)
        (first * first).sum().backward()


@scenario(tags=("function", "operator", "in-place", "errors"))
def custom_operator_in_place(p: Probe) -> None:
    """An operator that changes a buffer between forward and backward is found by the tensor's version."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    buffer = p.randn(3)
    y = x * buffer
    add_one_(buffer)
    with p.backward():
        y.sum().backward()


@scenario(tags=("function", "operator", "errors"))
def custom_operator_without_a_gradient(p: Probe) -> None:
    """An operator without a gradient is a RuntimeError in the backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        no_gradient(x).sum().backward()
