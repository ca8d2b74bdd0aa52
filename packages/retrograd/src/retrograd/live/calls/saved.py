"""Saved tensors under pack/unpack hooks.

In: the unpack hook and what the pack hook returned. Out: the tensor. Built-in nodes unpack what they
saved when they start; an ``autograd.Function`` unpacks each time its ``ctx.saved_tensors`` is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ModifiedTensor", "PackedTensor", "unpack", "unpack_on_access"]


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
class PackedTensor:
    """A saved tensor of a custom Function that has not been unpacked yet."""

    hook: Callable[[Any], Any]
    packed: Any

    def unpack(self) -> torch.Tensor:
        """Call the unpack hook; eager calls it again at each access, and so does this."""
        return unpack(self.hook, self.packed)


@dataclass(frozen=True)
class ModifiedTensor:
    """A saved tensor of a custom Function that was changed in place after the backward began."""

    error: str

    def unpack(self) -> torch.Tensor:
        """Raise what eager raises when the Function asks for it."""
        raise RuntimeError(self.error)


def unpack_on_access(hook: Callable[[Any], Any], packed: Any) -> PackedTensor:
    """Leave the saved tensor packed until the Function asks for it."""
    return PackedTensor(hook, packed)
