"""Custom Functions and random numbers inside a compiled forward.

In: a probe, whose `compile` is the identity for eager. Out: what the backwards get and return, as in eager.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.custom_functions import WithMask
from gradparity.corpus.scenarios.function_contracts import Counting
from gradparity.probe import Probe


@scenario(tags=("compiled", "function"), issue="pytorch#118396")
def compiled_mark_non_differentiable(p: Probe) -> None:
    """An output marked as not differentiable stays so when it leaves a compiled function."""
    x = p.leaf("x", p.tensor([0.5, -1.0, 2.0], requires_grad=True))
    positive, mask = p.compile(lambda a: WithMask.apply(a))(x)
    p.event("requires_grad", positive.requires_grad, mask.requires_grad)
    with p.backward():
        (positive * 2 + mask).sum().backward()


class MaybeSecond(torch.autograd.Function):
    """Two outputs; a missing gradient for the second is told from a zero one."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None
        return first * 2 if second is None else first * 2 + second * 3 + 100


@scenario(tags=("compiled", "function", "undefined"), issue="pytorch#118396")
def compiled_without_materialized_grads(p: Probe) -> None:
    """With `set_materialize_grads(False)` a missing gradient is None in a compiled function too."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, _ = p.compile(lambda a: MaybeSecond.apply(a))(x)
    with p.backward():
        first.sum().backward()


@scenario(tags=("compiled", "function"))
def compiled_function_counts_its_backwards(p: Probe) -> None:
    """What a Function writes on ctx lasts from one backward to the next: 1, 2, 3."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: Counting.apply(a))(x)
    with p.backward():
        for i in range(3):
            p.value(f"grad{i}", torch.autograd.grad(y.sum(), x, retain_graph=True))


class TooFew(torch.autograd.Function):
    """A sum of two tensors whose backward forgets one gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@scenario(tags=("compiled", "function", "errors"))
def compiled_function_returns_too_few(p: Probe) -> None:
    """A backward that returns fewer gradients than there were inputs is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    out = p.compile(lambda a, b: TooFew.apply(a, b))(x, y)
    with p.backward():
        out.sum().backward()


class KeepsOnCtx(torch.autograd.Function):
    """A product with an auxiliary output, which keeps its inputs on ctx without `save_for_backward`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.x, ctx.y = x.detach(), y.detach()
        return x * y, x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_abs: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.y + grad_of_abs * ctx.x.sign(), grad * ctx.x


@scenario(tags=("compiled", "function"))
def compiled_function_keeps_tensors_on_ctx(p: Probe) -> None:
    """Tensors kept on ctx are right in backward, although the auxiliary output is ignored."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product, _ = p.compile(lambda a, b: KeepsOnCtx.apply(a, b))(x, y)
    with p.backward():
        product.sum().backward()


class FirstOnly(torch.autograd.Function):
    """A product with a gradient for its first input only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 3, None


@scenario(tags=("compiled", "function", "undefined"), issue="pytorch#181146")
def compiled_same_tensor_twice_with_one_none(p: Probe) -> None:
    """The same tensor in both places of a Function that gives a gradient for one place only."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: FirstOnly.apply(a, a))(x)
    with p.backward():
        y.sum().backward()


@scenario(tags=("compiled", "function", "undefined", "hooks"))
def compiled_none_to_a_hooked_leaf(p: Probe) -> None:
    """Hooks of a leaf that gets None from a compiled Function are called."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    y.register_hook(p.hook("y"))
    out = p.compile(lambda a, b: FirstOnly.apply(a, b))(x, y)
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "random"), issue="pytorch#190758", fp64=False)
def dropout_under_a_memory_budget(p: Probe) -> None:
    """When memory is short and dropout is computed again, the mask is the same as in forward."""
    import torch._functorch.config as functorch_config

    layer = p.module(nn.Linear(8, 8))
    x = p.leaf("x", p.randn(4, 8, requires_grad=True))

    def run(h: Tensor) -> Tensor:
        return functional.dropout(layer(h).sin(), 0.5).exp().sin()

    with functorch_config.patch(activation_memory_budget=0.1):
        out = p.compile(run)(x)
    with p.backward():
        out.sum().backward()
    p.value("out", out.detach())


@scenario(tags=("compiled", "random"), fp64=False)
def dropout_in_a_compiled_forward(p: Probe) -> None:
    """Where dropout put zeros in the result, the gradient is zero as well."""
    x = p.leaf("x", p.rand(64, requires_grad=True))
    out = p.compile(lambda a: functional.dropout(a + 1, 0.5))(x)
    with p.backward():
        out.sum().backward()
    p.event("same_mask", x.grad is not None and bool(((out == 0) == (x.grad == 0)).all()))
