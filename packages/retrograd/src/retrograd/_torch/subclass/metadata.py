"""What a wrapper subclass is besides its inner tensors: its context and attributes, as guards see them.

In: a tensor that follows the ``__tensor_flatten__`` protocol. Out: `Metadata`, frozen in time, to be compared
with the same of another tensor and put on one that is rebuilt.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrograd.errors import Refusal

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
    enum.Enum,
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Metadata:
    """A copy of a subclass tensor's metadata.

    Attributes:
        context: the second part of ``__tensor_flatten__``.
        attributes: instance attributes that are neither inner tensors nor restored by the class itself.
        restored: the names of those that the class restores, with values where they can be compared.
        shared: whether nothing in `context` can be changed in place.
    """

    context: Any
    attributes: Mapping[str, Any]
    restored: Mapping[str, Any]
    shared: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, inner: Sequence[str], context: Any, rebuilt: torch.Tensor) -> Metadata:
        """Read the metadata of `tensor`, of which `rebuilt` is what the class makes of its flattened form.

        Raises:
            Refusal: a later change could not be noticed, or not be carried over.
        """
        name = type(tensor).__name__
        made = attributes_of(rebuilt, inner)
        attributes, restored = {}, {}
        for key, value in attributes_of(tensor, inner).items():
            if key in made and (is_same(made[key], value) or _guards_itself(tensor)):
                restored[key] = value
            elif _is_constant(value):
                attributes[key] = value
            else:
                raise Refusal(
                    "subclass-metadata", f"attribute {key!r} of {name} is lost when it is flattened"
                )
        frozen = _copied(context, f"the context of {name}")
        if not _agrees(tensor, frozen, context):
            raise Refusal("subclass-metadata", f"the context of {name} is not equal to its own copy")
        return cls(frozen, attributes, restored, _is_constant(context))

    def guarded(self, tensor: torch.Tensor) -> Metadata:
        """The same for comparing with: changes made in place to what the class restores are noticed too.

        Raises:
            Refusal: an attribute cannot be copied.
        """
        kept = {} if _guards_itself(tensor) else self.restored
        what = f"an attribute of {type(tensor).__name__}"
        return replace(self, restored={key: _copied(value, what) for key, value in kept.items()})

    def holds_for(self, tensor: torch.Tensor, inner: Sequence[str], context: Any) -> bool:
        """Whether `tensor` has the same metadata."""
        if not _agrees(tensor, self.context, context):
            return False
        now = attributes_of(tensor, inner)
        known = {**self.attributes, **self.restored}
        if _guards_itself(tensor):
            return all(key in now and is_same(value, now[key]) for key, value in self.attributes.items())
        return now.keys() == known.keys() and all(is_same(value, now[key]) for key, value in known.items())

    def own_context(self) -> Any:
        """The context for one more tensor: a copy where tensors could change it under one another."""
        return self.context if self.shared else copy.deepcopy(self.context)

    def put_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` the attributes that its class does not restore."""
        for key, value in self.attributes.items():
            setattr(tensor, key, value)
        return tensor


def attributes_of(tensor: torch.Tensor, inner: Sequence[str]) -> dict[str, Any]:
    """The instance attributes of `tensor` except for its inner tensors."""
    found = dict(vars(tensor))
    for cls in type(tensor).__mro__:
        if cls is torch.Tensor:
            break
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(tensor, name):
                found[name] = getattr(tensor, name)
    return {name: value for name, value in found.items() if name not in inner}


def is_same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 2, 2.0 and True are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


def holds_symbols(value: Any) -> bool:
    """Whether a symbolic number is, or may be, somewhere in `value`."""
    return any(isinstance(leaf, _SYMBOLIC) or not isinstance(leaf, _ATOMS) for leaf in _leaves(value))


def _guards_itself(tensor: torch.Tensor) -> bool:
    return hasattr(type(tensor), "__metadata_guard__")


def _agrees(tensor: torch.Tensor, before: Any, now: Any) -> bool:
    if _guards_itself(tensor):
        return bool(type(tensor).__metadata_guard__(before, now))  # type: ignore[attr-defined]
    return is_same(before, now)


def _is_constant(value: Any) -> bool:
    """Whether `value` is immutable through and through: what is hashed by value has to be."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    kind: Any = type(value)
    return isinstance(value, _ATOMS) or (kind.__eq__ is not object.__eq__ and _is_hashable(value))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return not isinstance(value, torch.Tensor)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    else:
        yield value


def _copied(value: Any, what: str) -> Any:
    if _is_constant(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise Refusal("subclass-metadata", f"{what} cannot be copied: {type(error).__name__}") from error
