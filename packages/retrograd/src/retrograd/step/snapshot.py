"""Python values as they were: compared before every call, by identity and, for numbers and texts, by value.

In: containers, names in namespaces and single values. Out: `Snapshot.fits`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

__all__ = ["MOST_PARTS", "SCALARS", "Snapshot", "are_same", "called", "is_same", "parts_of"]

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: how many parts of one container are looked at.
MOST_PARTS = 20_000
_UNBOUND = object()


class Snapshot:
    """Values as they were, to be compared quickly before every call."""

    def __init__(self, mentioned: frozenset[str] | None) -> None:
        self._mentioned = mentioned
        self._wholes: list[Any] = []
        self._empty: list[Any] = []
        self._whole_parts: list[tuple[Any, ...]] = []
        self._dicts: list[tuple[Any, tuple[str, ...], frozenset[Any]]] = []
        self._dict_parts: list[tuple[Any, ...]] = []
        self._reads: list[Callable[[], Any]] = []
        self._values: list[Any] = []

    def whole(self, container: Any) -> None:
        """All parts of a container."""
        if not container:
            self._empty.append(container)
        elif not isinstance(container, (tuple, frozenset)):
            self._wholes.append(container)
            self._whole_parts.append(_whole(container))

    def names(self, container: Any, keys: list[str]) -> None:
        """Some keys of a dictionary."""
        if keys:
            self._dicts.append((container, tuple(keys), frozenset(container)))
            self._dict_parts.append(tuple(map(container.get, keys)))

    def value(self, read: Callable[[], Any], value: Any) -> None:
        """One value."""
        self._reads.append(read)
        self._values.append(value)

    def fits(self) -> bool:
        """Whether all is as it was."""
        if any(self._empty):
            return False
        for container, parts in zip(self._wholes, self._whole_parts, strict=True):
            now = _whole(container)
            is_identical = len(now) == len(parts) and all(map(operator.is_, now, parts))
            if not (is_identical or are_same(now, parts)):
                return False
        for (container, keys, known), parts in zip(self._dicts, self._dict_parts, strict=True):
            now = tuple(map(container.get, keys))
            if not (all(map(operator.is_, now, parts)) or are_same(now, parts)):
                return False
            if len(container) != len(known) and self._are_read(container.keys() - known):
                return False
        return all(
            is_same(called(read), value) for read, value in zip(self._reads, self._values, strict=True)
        )

    def _are_read(self, keys: set[str]) -> bool:
        return bool(keys) and (self._mentioned is None or not self._mentioned.isdisjoint(keys))


def called(read: Callable[[], Any]) -> Any:
    """What `read` gives; a value like no other if there is nothing."""
    try:
        return read()
    except (ValueError, AttributeError):  # no longer bound
        return _UNBOUND


def parts_of(container: Any) -> tuple[Any, ...]:
    """The values in a container, in order."""
    return tuple(container.values() if isinstance(container, Mapping) else container)


def _whole(container: Any) -> tuple[Any, ...]:
    """What is compared of a container; of a very large one how many values it has."""
    if len(container) > MOST_PARTS:
        return (len(container),)
    return (*container, *container.values()) if isinstance(container, Mapping) else tuple(container)


def are_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether values are what they were, each."""
    return len(now) == len(before) and all(map(is_same, now, before))


def is_same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or an equal number or text, or the same method of the same object."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, float):
        return now.hex() == before.hex()
    if isinstance(now, SCALARS):
        return bool(now == before)
    return isinstance(now, MethodType) and now.__func__ is before.__func__ and now.__self__ is before.__self__
