"""Functions that are compiled while a backward is running, because a hook or Function calls them first there.

In: a probe, whose `compile` is the identity for eager. Out: first and second derivatives. A backward for
chosen inputs has each node compute only what they need; those of a capture are not among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

Fn = Callable[[Tensor, Tensor], Tensor]
TAGS = ("compiled", "aot", "reentrant")


class Implicit(torch.autograd.Function):
    """Its backward differentiates a function of what it has saved: an input, or its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, fn: Fn, of_output: bool) -> Tensor:
        ctx.fn = fn
        y = x * 2
        ctx.save_for_backward(y if of_output else x, a)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, a = ctx.saved_tensors
        with torch.enable_grad():
            value = ctx.fn(y, a)
        (grad,) = torch.autograd.grad(value, y, grads[0], create_graph=torch.is_grad_enabled())
        return grad, grad, None, None


def _scaled(y: Tensor, a: Tensor) -> Tensor:
    return torch.tanh(a * y)


def _twice(p: Probe, of_output: bool) -> None:
    """First and second derivatives through `Implicit`."""
    fn = p.compile(_scaled)
    x, a = p.leaf("x", p.randn(3, requires_grad=True)), p.leaf("a", p.randn(3, requires_grad=True))
    for step in range(2):
        y = Implicit.apply(x, a, fn, of_output)
        with p.backward():
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            p.value(f"first{step}", grad)
            p.value(f"second{step}", torch.autograd.grad(grad.sum(), (x, a)))


@scenario(tags=(*TAGS, "second-order"))
def aot_second_derivative_through_a_saved_output(p: Probe) -> None:
    """A Function differentiates a compiled function of its own output, twice."""
    _twice(p, of_output=True)


@scenario(tags=(*TAGS, "second-order"))
def aot_second_derivative_through_a_saved_input(p: Probe) -> None:
    """The same, of its input."""
    _twice(p, of_output=False)


def _first_called_by_hooks(p: Probe, hook: Callable[..., Any], differentiate: Callable[..., None]) -> None:
    """Three backwards, each with a hook that is given a compiled function and an argument of it."""
    fn = p.compile(_scaled)
    x, a = p.leaf("x", p.randn(3, requires_grad=True)), p.leaf("a", p.randn(3, requires_grad=True))
    for step in range(3):
        h = x.sin()
        h.register_hook(functools.partial(hook, fn, a))
        with p.backward():
            differentiate((h * h).sum(), x, f"grad{step}")


@scenario(tags=TAGS)
def aot_first_called_by_a_hook_of_a_backward_for_inputs(p: Probe) -> None:
    """A hook calls a compiled function for the first time, and differentiates it, inside `autograd.grad`."""

    def corrected(fn: Fn, a: Tensor, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = fn(grad.detach().requires_grad_(), a).sum()
        return grad + torch.autograd.grad(loss, a)[0]

    _first_called_by_hooks(p, corrected, lambda loss, x, name: p.value(name, torch.autograd.grad(loss, x)[0]))


@scenario(tags=TAGS)
def aot_first_called_by_a_hook_of_a_backward(p: Probe) -> None:
    """The same inside `backward`, which accumulates into both leaves."""

    def accumulated(fn: Fn, a: Tensor, grad: Tensor) -> None:
        with torch.enable_grad():
            fn(grad.detach(), a).sum().backward()

    _first_called_by_hooks(p, accumulated, lambda loss, x, name: loss.backward())
