"""Saved tensors that are not simply at hand: behind pack/unpack hooks, or changed since.

In: the unpack hook and what the pack hook returned, or what is wrong. Out: the tensor, or eager's error.
Built-in nodes unpack what they saved when they start; an ``autograd.Function`` does so itself, see
``functions.call_kept_backward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrograd._torch.autograd import node_under_way, read_saved, saved_name


def unpack(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """Call the unpack hook now; if the backward is to be differentiable, by way of the node that saved the
    tensor, which knows the tensor's history.

    Raises:
        TypeError: the hook returned something that is not a tensor.
    """
    if torch.is_grad_enabled():
        node = node_under_way()
        name = saved_name(node, hook, packed)
        if name is None:
            raise LookupError(f"{node} does not give what was packed into {packed!r}")
        return read_saved(node, name)
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
