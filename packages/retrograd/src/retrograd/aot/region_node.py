"""The autograd node of a region.

In: what a region saved, and the forward values of its junctions. Out: those values with a ``grad_fn`` whose backward
runs the region's compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Kept", "RegionNode", "carrying"]


@dataclass
class Kept:
    """What a region keeps besides its saved tensors.

    Attributes:
        numbers: saved values that are no tensors, by their position among the saved values.
        count: how many saved tensors there are; after them may come one that `carrying` made.
    """

    numbers: dict[int, Any]
    count: int


def carrying(value: Any) -> torch.Tensor:
    """A tensor without elements that keeps `value` alive: saved for the backward, it is given up with the graph."""
    carrier = torch.empty(0)
    carrier.carried = value  # type: ignore[attr-defined]
    return carrier


class RegionNode(torch.autograd.Function):
    """One node for one region, called with ``(backward, saved, kept, values, *inputs)``.

    `backward` gets the context and the cotangents, and gives a gradient for each of `inputs`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backward: Callable[..., Sequence[Any]],
        saved: Sequence[torch.Tensor],
        kept: Kept,
        values: tuple[torch.Tensor, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Save, and hand out the values."""
        ctx.run, ctx.kept = backward, kept
        ctx.materialize_grads = False
        ctx.save_for_backward(*saved)
        return values

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the region."""
        return None, None, None, None, *ctx.run(ctx, cotangents)
