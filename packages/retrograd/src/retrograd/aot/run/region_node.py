"""The autograd node of a region.

In: what a region saved, and the forward values of its boundaries. Out: those values with a ``grad_fn`` whose
backward runs the region's compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd._torch.autograd import entry_of


class RegionNode(torch.autograd.Function):
    """One node for one region. Its context keeps, besides the saved tensors, ``numbers`` (saved values that
    are no tensors) and ``again`` (what is needed to run the region as eager would); both are given up with
    them."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., Sequence[Any]],
        saved: tuple[torch.Tensor, ...],
        numbers: tuple[Any, ...],
        again: Any,
        values: tuple[torch.Tensor, ...],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Save, and hand out the values."""
        ctx.run, ctx.numbers, ctx.again = backward, numbers, again
        ctx.materialize_grads = False
        ctx.to_save = saved
        return values

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the region, which gets the context and the cotangents, and gives a gradient for each input."""
        return None, None, None, None, None, *ctx.run(ctx, cotangents)


#: called like ``RegionNode.apply``: with `RegionNode.forward`'s arguments after the context.
attach = entry_of(RegionNode)
