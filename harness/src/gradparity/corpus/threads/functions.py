"""Threads about custom Functions, derivatives inside the function, and complex operators.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

from typing import Any

import torch

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe


class NoGradient(torch.autograd.Function):
    """A sine whose backward says zero."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        """The sine."""
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the input."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Nothing arrives."""
        return torch.zeros_like(grad)


class OfTwo(torch.autograd.Function):
    """A function of two tensors with another gradient for each."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Product and sum."""
        ctx.save_for_backward(a, b)
        return a * b + a + b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One gradient each."""
        a, b = ctx.saved_tensors
        return grad * (b + 1), grad * (a + 1)


class AddsInPlace(torch.autograd.Function):
    """Changes a tensor of its own in place in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Twice the input, and one."""
        y = x * 2
        y += 1
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Twice the gradient."""
        return grad * 2


with collecting() as SCENARIOS:

    @scenario(issue="pytorch#193279")
    def t193279(p: Probe) -> None:
        """Eager's torch.func.grad uses the backward that a custom Function defines."""
        gradient = p.compile(torch.func.grad(lambda x: NoGradient.apply(x).sum()))
        p.value("gradient", gradient(p.randn(4)))

    @scenario(issue="pytorch#183604")
    def t183604(p: Probe) -> None:
        """Eager adds the gradients of both slots when one tensor stands in two."""
        x = p.leaf("x", p.randn(5, requires_grad=True))
        y = p.compile(lambda x: OfTwo.apply(x, x).sum())(x)
        with p.backward():
            y.backward()

    @scenario(issue="pytorch#180642")
    def t180642(p: Probe) -> None:
        """Eager sends the gradient to the result of a Function that changed it in place before."""
        x = p.leaf("x", p.randn(5, requires_grad=True))
        y = p.compile(lambda x: (AddsInPlace.apply(x) * 3).sum())(x)
        with p.backward():
            y.backward()

    @scenario(issue="pytorch#181581")
    def t181581(p: Probe) -> None:
        """Eager's gradient with create_graph requires grad itself."""
        w = p.leaf("w", p.randn(4, 4, requires_grad=True))
        x = p.leaf("x", p.randn(4, 4, requires_grad=True))

        def slope(x: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad((x @ w).relu().sum(), x, create_graph=True)[0]

        p.value("slope", p.compile(slope)(x))

    @scenario(issue="pytorch#197084")
    def t197084(p: Probe) -> None:
        """Eager differentiates the pseudo-inverse of a complex matrix."""
        a = p.leaf("a", torch.complex(p.randn(4, 3), p.randn(4, 3)).requires_grad_())
        y = p.compile(lambda a: torch.linalg.pinv(a).abs().pow(2).sum())(a)
        with p.backward():
            y.backward()
