"""Saved tensors behind unpack hooks, read from their autograd node: with the history they had when saved.

In: an autograd node, an unpack hook and what the pack hook returned. Out: the name under which the node gives
the tensor, and the tensor. Reading it calls the unpack hook. The engine hands over the hook and the packed
value only; ``SavedVariable::unpack`` adds the tensor's edge into the graph, or its being a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PREFIX = "_raw_saved_"


def saved_name(node: Any, hook: Callable[..., Any], packed: Any) -> str | None:
    """Under which name `node` gives the tensor that was packed into `packed`; None if it cannot be told."""
    names = [
        name for name in dir(node) if name.startswith(_PREFIX) and _is(getattr(node, name), hook, packed)
    ]
    if len(names) > 1 and not (isinstance(packed, torch.Tensor) and len(set(node.next_functions)) == 1):
        return None  # tensors of different history may have been packed into one value
    return names[0].removeprefix("_raw") if names else None


def read_saved(node: Any, name: str) -> torch.Tensor:
    """The saved tensor with its history, by way of its unpack hook."""
    tensor = getattr(node, name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _is(saved: Any, hook: Callable[..., Any], packed: Any) -> bool:
    # Lists of saved tensors are left out: torch reads them as a whole only.
    is_one = isinstance(saved, torch._C._autograd.SavedTensor)
    return is_one and saved.unpack_hook is hook and saved.data is packed
