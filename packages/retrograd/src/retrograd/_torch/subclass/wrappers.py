"""Wrapper subclasses as values: what a tensor is made of, taken apart and put together again.

In: tensors that follow the ``__tensor_flatten__`` protocol, or plain ones. Out: `Wrapping`: class, metadata
and parts, from which an equal one can be built of other inner tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd._torch.subclass.border import is_wrapper


@dataclass(frozen=True)
class Wrapping:
    """How a tensor is made up; a plain one has no class.

    Attributes:
        cls, context: what ``__tensor_unflatten__`` needs.
        parts: name and wrapping of each inner tensor.
        size, stride: of the outer tensor.
    """

    cls: Any = None
    context: Any = field(default=None, compare=False)
    parts: tuple[tuple[str, Wrapping], ...] = ()
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many plain tensors it takes."""
        return 1 if self.cls is None else sum(part.count for _, part in self.parts)

    def fits(self, value: Any) -> bool:
        """Whether a value is made up like this."""
        if self.cls is None:
            return not is_wrapper(value)
        if type(value) is not self.cls:
            return False
        names, context = value.__tensor_flatten__()
        if tuple(names) != tuple(name for name, _ in self.parts) or not bool(context == self.context):
            return False
        if tuple(value.shape) != self.size:
            return False
        return all(part.fits(getattr(value, name)) for name, part in self.parts)


PLAIN = Wrapping()


def wrapping_of(value: Any) -> Wrapping:
    """How `value` is made up."""
    if not is_wrapper(value):
        return PLAIN
    names, context = value.__tensor_flatten__()
    parts = tuple((name, wrapping_of(getattr(value, name))) for name in names)
    return Wrapping(type(value), context, parts, tuple(value.shape), tuple(value.stride()))


def parts_of(value: Any, wrapping: Wrapping) -> list[Any]:
    """The plain tensors inside `value`."""
    if wrapping.cls is None:
        return [value]
    return [inner for name, part in wrapping.parts for inner in parts_of(getattr(value, name), part)]


def built(wrapping: Wrapping, values: Iterator[Any]) -> Any:
    """The tensor made up of the next `values`."""
    if wrapping.cls is None:
        return next(values)
    inner = {name: built(part, values) for name, part in wrapping.parts}
    made: torch.Tensor = wrapping.cls.__tensor_unflatten__(
        inner, wrapping.context, wrapping.size, wrapping.stride
    )
    return made
