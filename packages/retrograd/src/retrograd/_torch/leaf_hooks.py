"""Hooks that run when the gradient of a leaf has accumulated.

In: the inputs of a call. Out: whether any has such hooks. They may free the gradient at once, as an optimizer
in backward does, so that it matters how many gradients there are at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["handles_made", "has_waiting_hooks", "hooks_of"]


def has_waiting_hooks(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a leaf with post-accumulate-grad hooks."""
    return any(bool(value._post_accumulate_grad_hooks) for value in values if type(value) in _PLAIN)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def hooks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's own hooks, and those that run after its gradient has accumulated, each in order."""
    hooks, waiting = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return tuple((hooks or {}).values()), tuple((waiting or {}).values())


def handles_made() -> int:
    """How many handles of hooks torch has given out; the same number: nobody has registered a hook since."""
    count: int = RemovableHandle.next_id
    return count
