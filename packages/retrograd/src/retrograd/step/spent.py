"""What a step returns of a graph that it has used up.

In: a tensor. Out: the same values, requiring grad, whose backward raises what torch raises when a graph is
used a second time.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd._torch.engine import EngineRequest, run_stock
from retrograd._torch.window import window

__all__ = ["spent"]


def spent(value: torch.Tensor) -> torch.Tensor:
    """`value` with a history that cannot be used."""
    made: torch.Tensor = _Spent.apply(_root(), value)
    return made


def _root() -> torch.Tensor:
    return torch.empty(0, requires_grad=True)


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            root = torch.ones((), requires_grad=True).exp()
        request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
        with window.stock():
            run_stock(request)
            run_stock(request)
