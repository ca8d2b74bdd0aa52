"""Tensors that a function gets hold of without being given them: from closures, globals, attributes.

In: a trace in which the function runs. Out: each such tensor becomes an input of the trace when it is first
used, and hooks that the function wants to register are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from retrograd._torch import pytree
from retrograd._torch.trace.functional import is_traced
from retrograd.errors import Refusal

#: by name: while a context of the live path is open, some of these are wrapped.
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_CHANGES = {
    torch.Tensor.detach_: "detach_",
    torch.Tensor.resize_: "resize_",
    torch.Tensor.resize_as_: "resize_as_",
    torch.Tensor.set_: "set_",
    torch.Tensor.data.__set__: "assigning to .data",  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__: "assigning to .grad",  # type: ignore[union-attr]
}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class FreeTensors(TorchFunctionMode):
    """While open, real tensors are replaced by what `lift` makes of them.

    Attributes:
        bared: tensors of which ``.data`` was taken.
    """

    def __init__(self, lift: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._lift = lift
        self.bared: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _HOOKS:
            raise Refusal("hook-in-trace", f"it calls Tensor.{func.__name__}")
        if func in _CHANGES:
            raise Refusal("tensor-changed", f"it changes a tensor by {_CHANGES[func]}")
        if func == _DATA:
            self.bared.append(args[0])
        kwargs = kwargs or {}
        if any(_is_free(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map(self._replaced, (args, kwargs))
        return func(*args, **kwargs)

    def _replaced(self, leaf: Any) -> Any:
        return self._lift(leaf) if _is_free(leaf) else leaf


def _is_free(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_traced(leaf)
