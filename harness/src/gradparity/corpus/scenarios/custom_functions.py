"""Custom Functions: every option that changes what a Function's backward gets or may return.

In: a probe. Out: the arguments that backward sees, and the gradients that come of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


class Cube(torch.autograd.Function):
    """Cube with a separate `setup_context`."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x**3 * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, scale = inputs
        ctx.save_for_backward(x)
        ctx.scale = scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale, None


@scenario(tags=("function",))
def function_with_setup_context(p: Probe) -> None:
    """A Function with `setup_context` and a non-tensor argument, under a hook."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = Cube.apply(x, 0.5)
    y.register_hook(p.hook("y"))
    with p.backward():
        y.sum().backward()


class Product(torch.autograd.Function):
    """Product that computes only the gradients that are needed."""

    @staticmethod
    def forward(ctx: FunctionCtx, record: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.record = record
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        ctx.record(ctx.needs_input_grad)
        _, x_needs, y_needs = ctx.needs_input_grad
        return None, grad * y if x_needs else None, grad * x if y_needs else None


@scenario(tags=("function",))
def function_needs_input_grad(p: Probe) -> None:
    """`needs_input_grad` tells which inputs require a gradient, by position, non-tensors included."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    constant = p.randn(3)
    record = p.hook("needs_input_grad", kind="function")
    with p.backward():
        Product.apply(record, x, constant).sum().backward()
        Product.apply(record, constant, x.sin()).sum().backward()


@scenario(tags=("function",))
def function_needs_input_grad_with_inputs(p: Probe) -> None:
    """`inputs=` does not narrow `needs_input_grad`: all gradients are computed, and one is dropped."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product = Product.apply(p.hook("needs_input_grad", kind="function"), x.sin(), y.sin())
    with p.backward():
        product.sum().backward(inputs=[y])


class Reversed(torch.autograd.Function):
    """Exponential whose backward works on detached values only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.detach().clone()


@scenario(tags=("function",))
def function_once_differentiable(p: Probe) -> None:
    """A once-differentiable Function that saves its own output works in a first backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Reversed.apply(x).sum().backward()


@scenario(tags=("function", "higher-order", "errors"))
def function_once_differentiable_twice(p: Probe) -> None:
    """Differentiating a once-differentiable backward again is a RuntimeError in the second one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (first,) = torch.autograd.grad(Reversed.apply(x).pow(2).sum(), x, create_graph=True)
        p.event("requires_grad", first.requires_grad)
        first.sum().backward()


class AddInPlace(torch.autograd.Function):
    """Add one in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@scenario(tags=("function", "in-place"))
def function_mark_dirty(p: Probe) -> None:
    """A Function that changes its input in place becomes the history of that tensor."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    out = AddInPlace.apply(y)
    p.event("same_object", out is y)
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * 3).sum().backward()


class WithMask(torch.autograd.Function):
    """A positive part, and its mask as a float output that has no gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_mask: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask + grad_of_mask * 10


@scenario(tags=("function",), issue="pytorch#118396")
def function_mark_non_differentiable(p: Probe) -> None:
    """An output marked as not differentiable requires no gradient; its gradient arrives as zeros."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    positive, mask = WithMask.apply(x)
    p.event("mask.requires_grad", mask.requires_grad)
    with p.backward():
        (positive * 2 + mask * x).sum().backward()


class TwoOutputs(torch.autograd.Function):
    """Two outputs; the gradients arrive as zeros or as None, by the first argument."""

    @staticmethod
    def forward(ctx: FunctionCtx, materialize: bool, record: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(materialize)
        ctx.record = record
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[None, None, Tensor]:
        ctx.record(first, second)
        assert first is not None
        return None, None, first * 2 if second is None else first * 2 + second * 3 + 100


@scenario(tags=("function", "undefined"), issue="pytorch#118396")
def function_without_materialized_grads(p: Probe) -> None:
    """With `set_materialize_grads(False)` the gradient of an unused output is None."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, _ = TwoOutputs.apply(False, p.hook("grads", kind="function"), x)
    with p.backward():
        first.sum().backward()


@scenario(tags=("function", "undefined"))
def function_with_materialized_grads(p: Probe) -> None:
    """By default the gradient of an unused output is a tensor of zeros."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, _ = TwoOutputs.apply(True, p.hook("grads", kind="function"), x)
    with p.backward():
        first.sum().backward()


class Raises(torch.autograd.Function):
    """Double, with a backward that fails."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BufferError("refused")


@scenario(tags=("function", "errors"))
def function_raises(p: Probe) -> None:
    """The exception of a Function's backward keeps its type; leaves done before keep their gradients."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    with p.backward():
        (Raises.apply(x.sin()) * y).sum().backward()
