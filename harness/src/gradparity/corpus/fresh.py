"""Fresh copies of sample inputs, so that one run cannot see what another did to them.

In: any nesting of containers with tensors. Out: the same nesting with own tensors in the run's dtype, strides
kept, and one copy for a tensor that stands in two places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradparity.probe import WIDER, Probe


def fresh(tree: Any, p: Probe) -> Any:
    """Copies all tensors of a pytree; dtype arguments are widened along with them in the float64 reference
    run.
    """
    memo: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = _copied(leaf, p)
            return memo[id(leaf)]
        if isinstance(leaf, torch.dtype) and p.is_reference:
            return WIDER.get(leaf, leaf)
        return leaf

    return pytree.tree_map(copy, tree)


def differentiable(tree: Any) -> list[torch.Tensor]:
    """All tensors of a pytree that require grad, each once, in order."""
    found: dict[int, torch.Tensor] = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _copied(source: torch.Tensor, p: Probe) -> torch.Tensor:
    with torch.no_grad():
        plain = source.detach()
        if (
            plain.layout is torch.strided
            and not plain.is_nested
            and not plain.is_contiguous()
            and _is_plain(plain)
        ):
            made = _same_storage_shape(plain)
        else:
            made = plain.clone()
        made = p.cast(made)
    return made.requires_grad_(source.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.is_conj() and not tensor.is_neg()


def _same_storage_shape(source: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset in a storage of its own, gaps and overlaps included."""
    whole = torch.empty(0, dtype=source.dtype, device=source.device)
    whole.set_(source.untyped_storage().clone(), source.storage_offset(), source.size(), source.stride())
    return whole
