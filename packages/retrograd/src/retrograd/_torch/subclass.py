"""Tensor subclasses that wrap other tensors (the ``__tensor_flatten__`` protocol): taken apart, put together.

In: values, some of them wrapper subclasses. Out: a `Layout`: class, metadata and inner values, frozen in
time, to be compared with another value, and from which an equal one can be built of other inner tensors.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd.errors import Refusal
from retrograd.graph.structure import is_same

#: what holds nothing else, and so nothing that was traced.
ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type, enum.Enum,
)  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    """A copy of a subclass tensor's metadata.

    Attributes:
        context: the second part of ``__tensor_flatten__``.
        shared: whether nothing in `context` can be changed in place.
    """

    context: Any
    shared: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, context: Any) -> Metadata:
        """That of `tensor`, whose `context` is given.

        Raises:
            Refusal: the context cannot be copied, or not be compared.
        """
        name = type(tensor).__name__
        is_shared = _is_constant(context)
        try:
            frozen = context if is_shared else copy.deepcopy(context)
        except Exception as error:
            text = f"the context of {name} cannot be copied: {type(error).__name__}"
            raise Refusal("subclass-metadata", text) from error
        if not _agrees(tensor, frozen, context):
            raise Refusal("subclass-metadata", f"the context of {name} is not equal to its own copy")
        return cls(frozen, is_shared)

    def holds_for(self, tensor: torch.Tensor, context: Any) -> bool:
        """Whether `tensor` has the same metadata."""
        return _agrees(tensor, self.context, context)

    def own_context(self) -> Any:
        """The context for one more tensor: a copy where tensors could change it under one another."""
        return self.context if self.shared else copy.deepcopy(self.context)


def _agrees(tensor: torch.Tensor, before: Any, now: Any) -> bool:
    if hasattr(type(tensor), "__metadata_guard__"):
        return bool(type(tensor).__metadata_guard__(before, now))  # type: ignore[attr-defined]
    return is_same(before, now)


def _is_constant(value: Any) -> bool:
    """Whether `value` is immutable through and through: what is hashed by value has to be."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    kind: Any = type(value)
    return isinstance(value, ATOMS) or (kind.__eq__ is not object.__eq__ and _is_hashable(value))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return not isinstance(value, torch.Tensor)


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a subclass tensor that can be flattened."""
    if type(value) is torch.Tensor or not is_traceable_wrapper_subclass(value):
        return False
    tensor: torch.Tensor = value  # type: ignore[assignment]
    return not tensor.is_nested and tensor.layout is torch.strided


@dataclass(frozen=True)
class Constant:
    """An inner value that is no tensor."""

    value: Any = field(compare=False)
    count = 0


@dataclass(frozen=True)
class Plain:
    """A plain tensor."""

    cls = None
    count = 1


@dataclass(frozen=True)
class Wrapper:
    """A subclass tensor.

    Attributes:
        cls, metadata: what it is besides its parts.
        parts: name and layout of each inner value.
        geometry: outer sizes and strides.
    """

    cls: Any
    metadata: Metadata = field(compare=False)
    parts: tuple[tuple[str, Plain | Wrapper | Constant], ...]
    geometry: tuple[Any, ...]

    @property
    def count(self) -> int:
        """How many plain tensors it takes."""
        return sum(part.count for _, part in self.parts)


Layout = Plain | Wrapper
PLAIN = Plain()


def layout_of(value: Any) -> Layout:
    """How `value` is made up, whether or not it requires grad and whatever attributes it has.

    Raises:
        Refusal: it cannot be taken apart without loss.
    """
    if not is_wrapper(value):
        return PLAIN
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    parts = tuple(
        (name, layout_of(part) if isinstance(part, torch.Tensor) else Constant(part))
        for name, part in inner.items()
    )
    return Wrapper(type(value), Metadata.of(value, context), parts, (*value.shape, *value.stride()))


def parts_of(value: Any, layout: Layout | Constant) -> list[Any]:
    """The plain tensors inside `value`."""
    if isinstance(layout, Wrapper):
        return [inner for name, part in layout.parts for inner in parts_of(getattr(value, name), part)]
    return [value] * layout.count


def fits(layout: Layout | Constant, value: Any) -> bool:
    """Whether a value is made up like this; its strides may differ."""
    if isinstance(layout, Constant):
        return not isinstance(value, torch.Tensor) and bool(value is layout.value or value == layout.value)
    if isinstance(layout, Plain):
        return not is_wrapper(value)
    if type(value) is not layout.cls:
        return False
    names, context = value.__tensor_flatten__()
    if list(names) != [name for name, _ in layout.parts] or 2 * value.dim() != len(layout.geometry):
        return False
    if any(known != size for known, size in zip(layout.geometry, value.shape, strict=False)):
        return False
    return layout.metadata.holds_for(value, context) and all(
        fits(part, getattr(value, name)) for name, part in layout.parts
    )


def built(layout: Layout | Constant, flat: Iterator[Any]) -> Any:
    """Put a value together of the next flat values."""
    if isinstance(layout, Constant):
        return layout.value
    if isinstance(layout, Plain):
        return next(flat)
    inner = {name: built(part, flat) for name, part in layout.parts}
    rank = len(layout.geometry) // 2
    size, stride = torch.Size(layout.geometry[:rank]), layout.geometry[rank:]
    return layout.cls.__tensor_unflatten__(inner, layout.metadata.own_context(), size, stride)
