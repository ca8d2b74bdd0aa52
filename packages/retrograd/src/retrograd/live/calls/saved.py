"""Saved tensors that are not simply at hand: behind pack/unpack hooks, or changed since.

In: the unpack hook and what the pack hook returned, or what is wrong. Out: the tensor, or eager's error.
Built-in nodes unpack what they saved when they start; an ``autograd.Function`` whose saved tensors are
behind hooks is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ModifiedTensor", "unpack"]


def unpack(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """Call the unpack hook now.

    Raises:
        TypeError: the hook returned something that is not a tensor.
    """
    tensor = hook(packed)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            "Output of saved tensor unpack_hook expected to be a Tensor "
            f"but got result of type {type(tensor)}"
        )
    return tensor


@dataclass(frozen=True)
class ModifiedTensor:
    """A saved tensor of a custom Function that was changed in place after the backward began."""

    error: str

    def unpack(self) -> torch.Tensor:
        """Raise what eager raises when the Function asks for it."""
        raise RuntimeError(self.error)
