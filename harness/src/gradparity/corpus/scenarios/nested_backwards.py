"""Backwards inside backwards: in hooks, in Functions, in reentrant checkpoints, several levels deep.

Checked here: what each level sees, when its callbacks run, and that the outer one goes on unimpressed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


class InnerGrad(torch.autograd.Function):
    """A scaled tanh whose backward asks `autograd.grad` for its derivative, and records that it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Probe, levels: int) -> Tensor:
        ctx.probe, ctx.levels = p, levels
        ctx.save_for_backward(x)
        return x.tanh() * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.probe.event("enter", ctx.levels)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = y.tanh() if ctx.levels == 0 else InnerGrad.apply(y, ctx.probe, ctx.levels - 1) / 2
            inner.register_hook(ctx.probe.hook(f"inside level {ctx.levels}"))
            (grad,) = torch.autograd.grad(inner, y, grads[0] * 2)
        ctx.probe.event("leave", ctx.levels)
        return grad, None, None


def _queue(p: Probe, name: str) -> None:
    """Queue a callback that records its name."""
    Variable._execution_engine.queue_callback(lambda: p.event(name))


@scenario(tags=("reentrant", "function"))
def autograd_grad_inside_a_function(p: Probe) -> None:
    """A Function's backward that calls `autograd.grad` runs to its end before the outer backward goes on."""
    x = p.leaf("x", p.randn(5, requires_grad=True))
    side = x.exp()
    side.register_hook(p.hook("side"))
    y = InnerGrad.apply(x * 2, p, 0)
    y.register_hook(p.hook("outer"))
    with p.backward():
        (y * side).sum().backward()


@scenario(tags=("reentrant", "function"))
def functions_nested_three_deep(p: Probe) -> None:
    """Three levels of backward inside backward, each with hooks of its own."""
    x = p.leaf("x", p.randn(5, requires_grad=True))
    with p.backward():
        InnerGrad.apply(x, p, 2).sum().backward()


@scenario(tags=("reentrant", "checkpoint"))
def reentrant_checkpoints_four_deep(p: Probe) -> None:
    """Reentrant checkpoints inside one another recompute from the outside in, once per level above them."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def level(h: Tensor, n: int) -> Tensor:
        p.event("forward", n)
        h = (h * 1.5).sin()
        return checkpoint(level, h, n - 1, use_reentrant=True) if n else h

    with p.backward():
        level(x, 4).sum().backward()


@scenario(tags=("reentrant", "checkpoint"))
def long_chain_of_reentrant_checkpoints(p: Probe) -> None:
    """A hundred reentrant checkpoints, one after the other, each with a backward of its own inside."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    h = x
    for i in range(100):
        h = checkpoint(lambda t, i=i: (t + 0.01 * i).sin(), h, use_reentrant=True)
    h.register_hook(p.hook("last"))
    with p.backward():
        h.sum().backward()


@scenario(tags=("reentrant", "hooks"))
def backwards_inside_hooks_of_every_kind(p: Probe) -> None:
    """A backward can be run inside tensor hooks, node hooks and post-accumulate hooks alike."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    other = p.leaf("other", p.randn(3, requires_grad=True))

    def nested(name: str) -> Any:
        def run(*_: Any) -> None:
            with torch.enable_grad():
                z = other * 2
                z.register_hook(p.hook(f"inside {name}"))
                z.sin().sum().backward()

        return p.hook(name, run)

    y = x.exp()
    y.register_hook(nested("tensor"))
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(nested("node pre"))
    y.grad_fn.register_hook(nested("node post"))
    x.register_post_accumulate_grad_hook(nested("accumulated"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("reentrant", "hooks", "callbacks"))
def callbacks_of_nested_backwards(p: Probe) -> None:
    """A callback runs at the end of the backward in which it was queued, not of the outermost one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    other = p.leaf("other", p.randn(3, requires_grad=True))

    def nested(_: Tensor) -> None:
        _queue(p, "end of the outer")
        with torch.enable_grad():
            z = other.sin()
            z.register_hook(lambda grad: _queue(p, "end of the inner"))
            z.sum().backward()
        p.event("inner is done")
        _queue(p, "end of the outer, queued later")

    y = x.cos()
    y.register_hook(nested)
    x.register_hook(p.hook("leaf"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("reentrant", "hooks", "retain-grad"))
def backward_nested_in_one_that_retains_grads(p: Probe) -> None:
    """A nested backward among retained gradients: those of the outer are there when the inner has run."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()
    y.retain_grad()
    z.retain_grad()

    def nested(_: Tensor) -> None:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (inner**3).sum().backward()
        p.event("inside", inner.grad)

    y.register_hook(nested)
    with p.backward():
        z.sum().backward()
    p.value("grads", (y.grad, z.grad))


@scenario(tags=("reentrant", "hooks"))
def gradient_penalty_inside_a_hook(p: Probe) -> None:
    """A hook may differentiate twice, on a graph of its own, and return what it found."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def second(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            t = grad.detach().requires_grad_()
            (first,) = torch.autograd.grad(t.sin().sum(), t, create_graph=True)
            return torch.autograd.grad((first * first).sum(), t)[0]

    y = x.exp()
    y.register_hook(p.hook("y", second))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("reentrant", "hooks"))
def error_inside_a_nested_backward_is_caught(p: Probe) -> None:
    """A hook that catches the error of its nested backward goes on, and so does the outer backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("planted")

    def nested(_: Tensor) -> None:
        with torch.enable_grad():
            z = x.detach().requires_grad_().sin()
            z.register_hook(fail)
            try:
                z.sum().backward()
            except ArithmeticError as error:
                p.event("caught", str(error))

    y = x.exp()
    y.register_hook(nested)
    x.register_hook(p.hook("leaf"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("reentrant", "hooks"))
def nested_backward_hooks_the_outer_graph(p: Probe) -> None:
    """A hook that a nested backward puts on the outer graph is called, where it has not been passed yet."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    h = x.sin()
    y = h.exp()

    def nested(_: Tensor) -> None:
        with torch.enable_grad():
            z = x.detach().requires_grad_() * 2
            z.register_hook(lambda grad: h.register_hook(p.hook("late")) and None)
            z.sum().backward()

    y.register_hook(nested)
    with p.backward():
        y.sum().backward()


class Sunk(torch.autograd.Function):
    """Its backward runs that of another graph, in which it is called again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        inner = grads[0].detach().requires_grad_()
        if ctx.depth:
            with torch.enable_grad():
                Sunk.apply(inner.sin(), ctx.depth - 1).sum().backward()
        return grads[0] if inner.grad is None else inner.grad, None


@scenario(tags=("reentrant", "function"))
def backwards_nested_until_the_engine_takes_other_threads(p: Probe) -> None:
    """From a depth of 60 on, the engine runs a nested backward on another thread."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for depth in (5, 59, 150):
        with p.backward():
            Sunk.apply(x * 3, depth).sum().backward()
