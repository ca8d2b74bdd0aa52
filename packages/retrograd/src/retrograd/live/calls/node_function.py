"""A built-in autograd node, and the check of a node's outputs, in functional form.

In: ``(grads, *saved)``. Out: gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


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

    @property
    def names(self) -> tuple[str, ...]:
        """What tells two calls of one closure apart: their errors show it."""
        return (self.__name__,)

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """Gradients of the node's inputs."""
        result: Sequence[Any] = self.fn(grads, *saved)
        return result

    def __repr__(self) -> str:
        return f"autograd.{self.__name__}"


class OutputCheck(NodeFunction):
    """Checks the gradients that a node returned against what their consumers expect, and converts them.

    Args:
        fn: the engine's closure. node: name of the node, for the error.
    """

    #: how the closure begins an error, not knowing the node; eager names it.
    _NAMELESS = "[Compiled Autograd Tracing:]"

    def __init__(self, fn: Callable[..., Any], node: str) -> None:
        super().__init__("validate_outputs", fn)
        self._node = node

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, self._node)

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """The gradients as their consumers take them.

        Raises:
            RuntimeError: a gradient that does not fit, in eager's words.
        """
        try:
            return super().__call__(grads, *saved)
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(self._NAMELESS):
                raise
        raise RuntimeError(f"Function {self._node} returned an {text.removeprefix(self._NAMELESS)}")
