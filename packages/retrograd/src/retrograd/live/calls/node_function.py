"""A built-in autograd node in functional form: ``(grads, *saved) -> grads``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["NodeFunction"]


class NodeFunction:
    """Calls the closure that the engine gave for a kind of node. Prints as the node's name.

    Args:
        name: name of the autograd node, for example ``MulBackward0``.
        fn: the closure; takes a list of gradients (None for undefined) and the node's saved values.
    """

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = name
        self.__qualname__ = name
        self.__module__ = "autograd"

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """Gradients of the node's inputs."""
        result: Sequence[Any] = self.fn(grads, *saved)
        return result

    def __repr__(self) -> str:
        return f"autograd.{self.__name__}"
