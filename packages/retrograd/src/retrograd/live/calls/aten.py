"""The calls of an inlined AOT backward: its ATen operations, its constants, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from retrograd._torch.thread_state import as_if_autocast
from retrograd._torch.tracing import is_operator

__all__ = ["Constant", "Named", "Tangent", "operation", "pick"]


class Named:
    """A function under a name of our own.

    Args:
        name: shown in graphs.
        fn: what is called.
    """

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "aot"
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self._fn(*args, **kwargs)


class Constant(Named):
    """A value that the traced graph holds: a tensor, or the body of a higher-order operator."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name, lambda: value)


class _Operation(Named):
    """An operation of a traced graph.

    Args:
        name: shown in graphs.
        fn: the operation.
        dtype: what it made when it was traced; None if that is not known or not one tensor.
    """

    def __init__(self, name: str, fn: Callable[..., Any], dtype: torch.dtype | None) -> None:
        super().__init__(name, fn)
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The operation's result."""
        return as_if_autocast(self._dtype, self._fn, *args, **kwargs)


class Tangent(Named):
    """A gradient as the traced graph wants it.

    Args:
        read: brings it into the layout and class that the graph was traced for.
        zeros: makes what stands for it if user code returned None.
    """

    def __init__(self, read: Callable[[Any], list[Any]], zeros: Callable[[], torch.Tensor] | None) -> None:
        super().__init__("tangent", read)
        self._zeros = zeros

    def __call__(self, *grads: Any, **_: Any) -> Any:
        """The values that the graph takes."""
        (grad,) = grads
        return self._fn(self._zeros() if grad is None and self._zeros else grad)


def operation(node: fx.Node) -> Callable[..., Any]:
    """What runs an operation that stands in an AOT graph.

    Inductor gives the saved tensors of the forward strides of its own choice; the backward was traced before
    that, so that a ``view`` in it may have to copy.
    """
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default
    name = str(getattr(target, "__name__", target))
    if not is_operator(target):
        return Named(name, target)
    traced = node.meta.get("val")
    return _Operation(name, target, traced.dtype if isinstance(traced, torch.Tensor) else None)


def pick(values: Sequence[Any], i: int) -> Any:
    """Element `i`."""
    return values[i]
