"""Threads about changes in place: of views, of aliased inputs, between forward and backward.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config as functorch_config

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe


class AddsItsGradient(torch.autograd.Function):
    """Doubles; its backward adds the gradient to what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Keeps its second argument."""
        ctx.save_for_backward(kept)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Changes what was kept."""
        (kept,) = ctx.saved_tensors
        kept.add_(grad)
        return grad.clone(), None


with collecting() as SCENARIOS:

    @scenario(issue="pytorch#198095")
    def t198095(p: Probe) -> None:
        """Eager returns a row of the second argument, which shows what was added to the first."""
        whole = p.watch("whole", p.tensor(torch.arange(24.0).reshape(4, 6)))

        def added(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            one.add_(100)
            return two[0]

        p.value("row", p.compile(added)(whole, whole[1:]))

    @scenario(issue="pytorch#198102")
    def t198102(p: Probe) -> None:
        """Eager doubles exactly the columns that a view with gaps shows, and leaves the others alone."""
        x = p.watch("x", torch.arange(1, 25, device=p.device).reshape(4, 6))

        def doubled(x: torch.Tensor) -> torch.Tensor:
            view = x.unfold(1, 1, 5)
            view.add_(view)
            return x

        p.value("x", p.compile(doubled)(x))

    @scenario(issue="pytorch#197887")
    def t197887(p: Probe) -> None:
        """Eager refuses a backward whose saved input was changed since the forward."""
        x = p.randn(4, 4)
        w = p.leaf("w", p.randn(4, 4, requires_grad=True))
        y = p.compile(lambda x, w: x @ w)(x, w)
        x.add_(1)
        with p.backward():
            y.sum().backward()

    @scenario(issue="pytorch#172956")
    def t172956(p: Probe) -> None:
        """Eager lets a backward change a tensor that the forward saved and returned."""
        x = p.leaf("x", p.randn(4, requires_grad=True))

        def applied(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept = x.detach().clone()
            return AddsItsGradient.apply(x, kept).clone(), kept

        y, kept = p.compile(applied)(x)
        with p.backward():
            y.sum().backward()
        p.value("kept", kept)

    @scenario(issue="pytorch#197039")
    def t197039(p: Probe) -> None:
        """Eager's gradient uses what the forward read from a buffer that was changed since."""
        x = p.leaf("x", p.randn(4, requires_grad=True))
        buffer = p.watch("buffer", p.randn(4))
        with functorch_config.patch(activation_memory_budget=0.0):
            y = p.compile(lambda x, buffer: (x * buffer.exp()).sin() * buffer.exp())(x, buffer)
            buffer.add_(1)
            with p.backward():
                y.sum().backward()

    @scenario(issue="pytorch#183575")
    def t183575(p: Probe) -> None:
        """Eager's lerp_ leaves a moving average between the old value and the gradient."""
        state = {name: p.watch(name, p.randn(8, 8)) for name in ("p1", "p2", "m1", "m2")}
        x = p.randn(4, 8)

        def updated(p1: Any, p2: Any, x: Any, m1: Any, m2: Any) -> torch.Tensor:
            y = (x.to(torch.bfloat16) @ p1.to(torch.bfloat16)).relu() @ p2.to(torch.bfloat16)
            g1, g2 = (x.t() @ y.float()), (y.t().float() @ y.float())
            m1.lerp_(g1, 0.05)
            m2.lerp_(g2, 0.05)
            p1.add_(m1, alpha=-0.01)
            p2.add_(m2, alpha=-0.01)
            return y.float().sum()

        step = p.compile(updated)
        for number in range(2):
            p.value(f"loss {number}", step(state["p1"], state["p2"], x, state["m1"], state["m2"]))
