"""Custom Functions at their edges: state on ctx, odd results, undefined gradients, autograd in backward.

In: a probe. Out: gradients and events where compilers tend to assume that a backward is a pure function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.function_contracts import Counting
from gradparity.probe import Probe


class KeepsOnCtx(torch.autograd.Function):
    """Product that keeps its inputs on ctx without `save_for_backward`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.x, ctx.y = x, y.detach()
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_sum: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.y + grad_of_sum, grad * ctx.x + grad_of_sum


@scenario(tags=("function",))
def function_keeps_tensors_on_ctx(p: Probe) -> None:
    """Tensors kept on ctx without `save_for_backward` are read as they are in backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product, _ = KeepsOnCtx.apply(x, y)
    with p.backward():
        product.sum().backward()


@scenario(tags=("function",))
def function_counts_its_backwards(p: Probe) -> None:
    """What a backward writes on ctx is there in the next one: 1, 2, 3 over three retained backwards."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = Counting.apply(x)
    with p.backward():
        for i in range(3):
            p.value(f"grad{i}", torch.autograd.grad(y.sum(), x, retain_graph=True))


class Returns(torch.autograd.Function):
    """Add two tensors; backward returns what a callable makes of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, result: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.result = result
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.result(grad)


def _sum_through(p: Probe, result: Any) -> Tensor:
    """Return a loss through :class:`Returns` with two registered leaves."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = p.leaf("y", p.randn(3, 2, requires_grad=True))
    x.register_hook(p.hook("x"))
    out: Tensor = Returns.apply(result, x, y)
    return out.pow(2).sum()


@scenario(tags=("function", "errors"))
def function_returns_too_few_gradients(p: Probe) -> None:
    """A backward that returns fewer gradients than forward had inputs is a RuntimeError."""
    loss = _sum_through(p, lambda g: (None, g))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "errors"))
def function_returns_too_many_gradients(p: Probe) -> None:
    """A backward that returns more gradients than forward had inputs is a RuntimeError."""
    loss = _sum_through(p, lambda g: (None, g, g, g))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "undefined"))
def function_returns_nones_to_spare(p: Probe) -> None:
    """More results than forward had inputs are accepted if all those in excess are None."""
    loss = _sum_through(p, lambda g: (None, g, g, None, None))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "errors"))
def function_returns_another_shape(p: Probe) -> None:
    """A gradient whose shape does not reduce to the input's is a RuntimeError."""
    loss = _sum_through(p, lambda g: (None, g[:, :1].expand(3, 5), g))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "broadcast"))
def function_returns_a_larger_shape(p: Probe) -> None:
    """A gradient with extra leading dimensions is summed down to the input's shape."""
    loss = _sum_through(p, lambda g: (None, torch.stack([g, g * 2]), g))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "dtype"), fp64=False)
def function_returns_another_dtype(p: Probe) -> None:
    """A gradient of another floating dtype is converted to that of the input."""
    loss = _sum_through(p, lambda g: (None, g.to(torch.bfloat16), g.double()))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "aliasing"))
def function_returns_views(p: Probe) -> None:
    """A backward may return the gradient itself and a view of it; `.grad` of the leaves never overlap."""
    loss = _sum_through(p, lambda g: (None, g, g.view(2, 3).view(3, 2)))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "undefined"))
def function_returns_only_none(p: Probe) -> None:
    """When every gradient is None, the leaf's hook is called with None and `.grad` stays None."""
    loss = _sum_through(p, lambda g: (None, None, None))
    with p.backward():
        loss.backward()


@scenario(tags=("function", "undefined"), issue="pytorch#181146")
def same_tensor_twice_with_one_none(p: Probe) -> None:
    """When one tensor is passed twice and one of its gradients is None, the other one counts."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y"))
    with p.backward():
        Returns.apply(lambda g: (None, g, None), y, y).sum().backward()
        Returns.apply(lambda g: (None, None, g * 2), x, x).sum().backward()


@scenario(tags=("function", "undefined"))
def undefined_meets_defined(p: Probe) -> None:
    """Where a None gradient and a tensor meet, in either order, the sum is the tensor."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    hub = x.sin()
    hub.register_hook(p.hook("hub"))

    def stopped(t: Tensor) -> Tensor:
        out: Tensor = Returns.apply(lambda g: (None, None, None), t, t.detach())
        return out

    first = stopped(hub)
    middle = hub.exp()
    last = stopped(hub)
    with p.backward():
        (first + middle + last).sum().backward()


@scenario(tags=("undefined",))
def normalize_with_p_zero(p: Probe) -> None:
    """`F.normalize(p=0)` sends an undefined gradient into a sum with a defined one."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with p.backward():
        functional.normalize(x, p=0.0, dim=1).sum().backward()


class InnerAutograd(torch.autograd.Function):
    """Differentiate a function again inside backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x.sin() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = inner.sin() * inner
        (result,) = torch.autograd.grad(out, inner, grad)
        return result


@scenario(tags=("function", "reentrant"))
def autograd_inside_of_backward(p: Probe) -> None:
    """A backward that runs autograd inside itself gives the same gradient as the plain function."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = InnerAutograd.apply(x.exp())
    y.register_hook(p.hook("y"))
    with p.backward():
        (y + x).sum().backward()


class SavesOutput(torch.autograd.Function):
    """Sigmoid from its saved output, with the backward under its other name `vjp`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


@scenario(tags=("function",))
def function_with_vjp_and_saved_output(p: Probe) -> None:
    """`vjp` is another name for backward; an output that was saved is unpacked with its history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (first,) = torch.autograd.grad(SavesOutput.apply(x).sum(), x, create_graph=True)
        p.value("first", first)
        first.sum().backward()


@scenario(tags=("function",))
def function_without_differentiable_inputs(p: Probe) -> None:
    """A Function none of whose inputs requires a gradient leaves no node, and its backward never runs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = Returns.apply(lambda g: p.event("never"), p.randn(3), p.randn(3))
    p.event("requires_grad", out.requires_grad)
    with p.backward():
        (out * x).sum().backward()
