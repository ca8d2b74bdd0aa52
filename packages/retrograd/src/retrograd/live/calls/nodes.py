"""What the calls of built-in autograd nodes do, and those of a compiled function's own graph.

In: ``(grads, *saved)`` for a node, the gradient of a view's base for ``CopySlices``, values for an operation
of a compiled function's own graph. Out: gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
from torch import fx

from retrograd._torch.fx import is_higher_order, is_operator_overload
from retrograd._torch.state import as_if_autocast, without_torch_functions

Geometry = tuple[Sequence[int], Sequence[int], int]
Grad = torch.Tensor | None


class NodeFunction(functools.partial[Sequence[Any]]):
    """The closure that the engine gave for a kind of node, under the node's name. It is called from C."""

    __name__: str
    __qualname__: str

    def __new__(cls, name: str, fn: Callable[..., Any]) -> Self:
        """Name the closure."""
        self = super().__new__(cls, fn)
        self.__name__ = self.__qualname__ = name
        self.__module__ = "autograd"
        return self

    @property
    def structure_key(self) -> tuple[Hashable, ...]:
        """Equal for two that compute the same, and name the same node in their errors."""
        return self.func, self.__name__

    def __repr__(self) -> str:
        return f"autograd.{self.__name__}"


class OutputCheck(NodeFunction):
    """Checks the gradients that a node returned against what their consumers expect, and converts them."""

    #: how the closure begins an error. It does not know the node, which eager names.
    _NAMELESS = "[Compiled Autograd Tracing:]"

    _node: str

    def __new__(cls, fn: Callable[..., Any], node: str) -> Self:
        """Name the engine's closure `fn`, and the node, for its error."""
        self = super().__new__(cls, "validate_outputs", fn)
        self._node = node
        return self

    @property
    def structure_key(self) -> tuple[Hashable, ...]:
        return self.func, self.__name__, self._node

    def __call__(self, grads: Sequence[Any], *saved: Any) -> Sequence[Any]:
        """The gradients as their consumers take them.

        Raises:
            RuntimeError: a gradient does not fit; the text is eager's.
        """
        try:
            return self.func(grads, *saved)
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(self._NAMELESS):
                raise
        raise RuntimeError(f"Function {self._node} returned an {text.removeprefix(self._NAMELESS)}")


# the gradient of an in-place operation on a view: what stands around the operation's own backward. The rule
# is ``CopySlices::apply_impl`` in ``torch/csrc/autograd/functions/tensor.cpp``.


@without_torch_functions
def prologue(grad: Grad, base: Geometry, view: Geometry) -> tuple[Grad, Grad, Grad]:
    """Copy the base's gradient and cut out the part under the view.

    Args:
        grad: gradient of the base after the operation, of the base's sizes; None if undefined.
        base, view: sizes, strides and storage offset (in elements).

    Returns:
        The copy, its part under the view (an alias of the copy), and a contiguous clone of that part.
    """
    if grad is None:
        return None, None, None
    result = grad.new_empty_strided(tuple(base[0]), tuple(base[1]))
    result.copy_(grad)
    part = result.as_strided(tuple(view[0]), tuple(view[1]), view[2] - base[2])
    return result, part, part.clone(memory_format=torch.contiguous_format)


@without_torch_functions
def epilogue(needs: Sequence[bool], result: Grad, grads: Sequence[Grad], part: Grad) -> list[Grad]:
    """Put the operation's gradient in place of the part under the view.

    Args:
        needs: which of the operation's inputs want a gradient.
        result, part: from `prologue`; `result` is changed in place through `part`.
        grads: what the operation's backward returned.
    """
    if result is None:
        return [None] * len(needs)
    outputs = [grads[i] if needed else None for i, needed in enumerate(needs)]
    if outputs and outputs[0] is not None:
        assert part is not None
        part.copy_(outputs[0])
        outputs[0] = result
    return outputs


# the calls of a compiled function's own graph


class Named:
    """A function under a name of our own."""

    def __init__(self, name: str, fn: Callable[..., Any], key: tuple[Hashable, ...] | None = None) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "aot"
        self._fn = fn
        self.structure_key = self if key is None else (Named, *key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self._fn(*args, **kwargs)


def tangent(read: Callable[[Any], list[Any]], zeros: Callable[[], torch.Tensor] | None) -> Named:
    """Takes a gradient in.

    Args:
        read: brings it into the layout and class that the graph was traced for.
        zeros: makes the gradient that is taken instead if user code returned None.
    """
    return Named("tangent", lambda grad: read(zeros() if grad is None and zeros else grad))


def operation(node: fx.Node) -> Named:
    """Runs an operation of the graph, under autocast as eager would.

    Inductor gives the forward's saved tensors strides of its own choice. The backward was traced before that,
    so a ``view`` in it may have to copy.
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
