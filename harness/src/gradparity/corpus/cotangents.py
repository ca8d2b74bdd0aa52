"""Backwards of what a program returned, with the cotangents that torch makes, or with those that users bring.

In: outputs, and the leaves that they hang from. Out: nothing; values and gradients are observed through the
probe. A trace sees a cotangent of one layout, and a formula may depend on it: so `backward_from` can go
backward several times through one graph, each time with a cotangent laid out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradparity.probe import Probe

#: How many layouts one case sees, the last through a graph that is given up.
PER_CASE = 3


def cotangent(output: torch.Tensor, p: Probe) -> torch.Tensor:
    """A fixed random cotangent for this output; a complex one for complex outputs, the output itself where
    sparse.
    """
    if output.layout is not torch.strided:
        return output.detach().clone()
    if output.is_complex():
        real, imaginary = p.randn(*output.shape), p.randn(*output.shape)
        return torch.complex(real.to(output.real.dtype), imaginary.to(output.real.dtype))
    return p.randn(*output.shape).to(output.dtype)


def backward_from(
    outputs: Any, p: Probe, leaves: Sequence[torch.Tensor] = (), turn: int | None = None
) -> None:
    """Observes all tensor outputs and runs backward from the differentiable ones with fixed cotangents.

    Args:
        outputs: A pytree.
        p: Where they are observed.
        leaves: Tensors whose gradients are observed after each of several backwards, and then removed.
        turn: None: one backward. Else `PER_CASE` of them go through one graph, each with another layout of
            `LAYOUTS`. They begin with the layout of this number, so that each is the first that some case
            sees.
    """
    if not (roots := _roots(outputs, p)):
        return
    if turn is None:
        _backward(roots, p, "contiguous")
        return
    names = list(LAYOUTS)
    for number in range(PER_CASE):
        name = names[(turn + number) % len(names)]
        _backward(roots, p, name, retain_graph=number + 1 < PER_CASE)
        for place, leaf in enumerate(leaves):
            p.value(f"grad {place} of {name}", leaf.grad)
            if number + 1 < PER_CASE:
                leaf.grad = None


def _backward(roots: Sequence[torch.Tensor], p: Probe, layout: str, retain_graph: bool = False) -> None:
    cotangents = [laid_out(layout, cotangent(root, p)) for root in roots]
    with p.backward():
        torch.autograd.backward(roots, cotangents, retain_graph=retain_graph)


def _roots(outputs: Any, p: Probe) -> list[torch.Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    for place, tensor in enumerate(tensors):
        p.value(f"output {place}", tensor)
    return [tensor for tensor in tensors if tensor.requires_grad]


def laid_out(name: str, value: torch.Tensor) -> torch.Tensor:
    """`value` in the layout of this name, or as it is where it cannot be laid out so."""
    if value.layout is not torch.strided or not value.numel():
        return value
    return LAYOUTS[name](value)


def _expanded(value: torch.Tensor) -> torch.Tensor:
    return value[(0,) * value.dim()].expand(value.shape)


def _transposed(value: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(value.dim())))
    return value.permute(dims).contiguous().permute(dims)


def _strided(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value, value], dim=-1)[..., 0]


def _at_an_offset(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1:].view(value.shape)


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.contiguous(memory_format=formats.get(value.dim(), torch.contiguous_format))


def _negated(value: torch.Tensor) -> torch.Tensor:
    """With the conjugate bit, or the negative bit of an imaginary part that was not computed."""
    if value.is_complex():
        return value.conj()
    if value.dtype in (torch.float32, torch.float64):
        return torch.complex(value, value).conj().imag
    return value


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value,
    "expanded": _expanded,
    "transposed": _transposed,
    "strided": _strided,
    "channels last": _channels_last,
    "zeros": torch.zeros_like,
    "offset": _at_an_offset,
    "negated": _negated,
}
"""How a cotangent may lie in memory, by name."""
