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
#: take an offset from the beginning of the memory, as their fourth or fifth argument.
_STRIDED = {"as_strided": 3, "as_strided_": 3, "as_strided_copy": 3, "as_strided_scatter": 4}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class FreeTensors(TorchFunctionMode):
    """While open, real tensors are replaced by what `lift` makes of them.

    Attributes:
        bared: tensors of which ``.data`` was taken.
        reads_offsets: whether anything depended on where a tensor begins in its memory.
    """

    def __init__(self, lift: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._lift = lift
        self.bared: list[torch.Tensor] = []
        self.reads_offsets = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        self.reads_offsets |= name == "storage_offset" or _is_given_offset(name, args, kwargs or {})
        if name in _HOOKS:
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


def _is_given_offset(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call names a place in the memory of a tensor, so that it matters where the tensor begins."""
    place = _STRIDED.get(name, len(args))
    return name in _STRIDED and (place < len(args) or kwargs.get("storage_offset") is not None)


def _is_free(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_traced(leaf)
