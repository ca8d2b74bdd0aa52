"""The calls of an inlined AOT backward: its ATen operations, its constants, and what stands around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from retrograd._torch.fx import is_higher_order, is_operator_overload
from retrograd._torch.state import as_if_autocast


class Named:
    """A function under a name of our own.

    Args:
        name: shown in graphs.
        fn: what is called.
        key: equal for two that compute the same; None if that cannot be told.

    Attributes:
        key: as given.
    """

    def __init__(self, name: str, fn: Callable[..., Any], key: tuple[Hashable, ...] | None = None) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "aot"
        self._fn, self.key = fn, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self._fn(*args, **kwargs)


def constant(name: str, value: Any) -> Named:
    """Gives a value that the traced graph holds: a tensor, or the body of a higher-order operator."""
    return Named(name, lambda: value)


def tangent(read: Callable[[Any], list[Any]], zeros: Callable[[], torch.Tensor] | None) -> Named:
    """Takes a gradient in.

    Args:
        read: brings it into the layout and class that the graph was traced for.
        zeros: makes what stands for it if user code returned None.
    """
    return Named("tangent", lambda grad: read(zeros() if grad is None and zeros else grad))


def operation(node: fx.Node) -> Named:
    """Runs an operation that stands in an AOT graph, under autocast as eager would.

    Inductor gives the saved tensors of the forward strides of its own choice; the backward was traced before
    that, so that a ``view`` in it may have to copy.
    """
    target: Any = node.target
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default
    name = str(getattr(target, "__name__", target))
    if not is_operator_overload(target) and not is_higher_order(target):
        return Named(name, target, (target,))
    traced = node.meta.get("val")
    dtype = traced.dtype if isinstance(traced, torch.Tensor) else None
    return Named(name, functools.partial(as_if_autocast, dtype, target), (target, dtype))
