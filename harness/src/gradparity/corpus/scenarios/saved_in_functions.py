"""Saved tensors of custom Functions: unpacked when backward reads them, as often as it does.

In: a probe. Out: unpack events between the events of a backward that reads late, twice, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _watch(p: Probe) -> saved_tensors_hooks:
    """Return saved-tensor hooks that record every call and keep the values."""
    return saved_tensors_hooks(
        p.hook("pack", lambda t: t, kind="pack"), p.hook("unpack", lambda t: t, kind="unpack")
    )


class Square(torch.autograd.Function):
    """Square, whose backward reads its saved tensors a given number of times."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, reads: int, record: Callable[..., Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.reads, ctx.record = reads, record
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        result = 2 * grad
        for i in range(ctx.reads):
            ctx.record("before_read", i)
            (x,) = ctx.saved_tensors
            ctx.record("after_read", i)
            result = result * x
        return result, None, None


@scenario(tags=("hooks", "saved", "function"), issue="pytorch#148222")
def function_reads_saved_tensors_late(p: Probe) -> None:
    """A Function's saved tensors are unpacked when its backward reads them, not before it starts."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _watch(p):
        y = Square.apply(x, 1, p.hook("backward", kind="function"))
    y.register_hook(p.hook("y"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "saved", "function"), issue="pytorch#148222")
def function_reads_saved_tensors_twice(p: Probe) -> None:
    """Every read of `saved_tensors` unpacks again."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _watch(p):
        y = Square.apply(x, 2, p.hook("backward", kind="function"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "saved", "function"), issue="pytorch#148222")
def function_never_reads_saved_tensors(p: Probe) -> None:
    """A Function that never reads `saved_tensors` causes no unpacking."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with _watch(p):
        y = Square.apply(x, 0, p.hook("backward", kind="function")).cos()
    with p.backward():
        y.sum().backward()


class KeepsTwo(torch.autograd.Function):
    """A product of two saved tensors whose backward reads them only if the gradient is positive."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, None, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if grad.sum() <= 0:
            return None, None
        x, nothing, y = ctx.saved_tensors
        assert nothing is None
        return grad * y, grad * x


@scenario(tags=("hooks", "saved", "function", "data-dependent"), issue="pytorch#148222")
def function_reads_saved_tensors_by_value(p: Probe) -> None:
    """Whether saved tensors are unpacked can depend on the gradient; None among them stays None."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    with _watch(p):
        out = KeepsTwo.apply(x, y.exp())
    with p.backward():
        (-out).sum().backward(retain_graph=True)
        p.event("between")
        out.sum().backward()


@scenario(tags=("saved", "function", "errors"))
def function_reads_saved_tensors_after_backward(p: Probe) -> None:
    """Saved tensors that are read after a backward that did not retain them are a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = KeepsTwo.apply(x, x)
    node: Any = out.grad_fn
    p.value("before", node.saved_tensors)
    with p.backward():
        out.sum().backward()
    p.value("after", node.saved_tensors)


@scenario(tags=("hooks", "saved"), issue="pytorch#148222")
def unpack_reads_what_a_hook_has_set(p: Probe) -> None:
    """Unpack hooks see what the tensor hooks that ran before them left behind, and nothing later."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    state = {"factor": 1.0}
    with saved_tensors_hooks(lambda t: t, lambda t: t * state["factor"]):
        y = x.sin()
        z = y.exp()
        w = z * y
    z.register_hook(p.hook("z", lambda g: state.update(factor=3.0)))
    y.register_hook(p.hook("y", lambda g: state.update(factor=5.0)))
    with p.backward():
        w.sum().backward()
