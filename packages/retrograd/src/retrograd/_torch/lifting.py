"""Tensors that a function gets hold of without being given them: from closures, globals, attributes.

In: a trace in which the function runs. Out: each such tensor becomes an input of the trace when it is first
used, and hooks that the function wants to register are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograd._torch.functional import is_traced

__all__ = ["FreeTensors", "HookInTraceError"]

_HOOKS = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
}


class HookInTraceError(Exception):
    """The traced function registers a hook, which a trace would call once instead of at every backward."""


class FreeTensors(TorchFunctionMode):
    """While open, real tensors are replaced by what `lift` makes of them."""

    def __init__(self, lift: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._lift = lift

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOOKS:
            raise HookInTraceError(f"it calls Tensor.{func.__name__}")
        kwargs = kwargs or {}
        if any(_is_free(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map(self._replaced, (args, kwargs))
        return func(*args, **kwargs)

    def _replaced(self, leaf: Any) -> Any:
        return self._lift(leaf) if _is_free(leaf) else leaf


def _is_free(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_traced(leaf)
