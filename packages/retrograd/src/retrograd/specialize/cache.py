"""A bounded store of what was compiled.

In: a key, which must be equal, and values, for which a guard must hold. Out: the entry for them, or None.
When there are too many entries, the one that was not used for longest is given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from retrograd.process import ForkSafeLock


class Guard(Protocol):
    """What must hold for an entry to be used."""

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether it holds for `values`."""
        ...


class _Anything:
    """No condition."""

    def fits(self, values: Sequence[Any]) -> bool:
        return True


#: for entries of which the key says all.
ANYTHING: Guard = _Anything()


class Guarded(Protocol):
    """An entry with its guard."""

    @property
    def guard(self) -> Guard:
        """When it may be used."""
        ...


E = TypeVar("E", bound=Guarded)


@dataclass
class _Kept(Generic[E]):
    entry: E
    used: int


class GuardedCache(Generic[E]):
    """Entries by key, and of those of one key, the first whose guard holds.

    Args:
        size: how many entries are kept, of all keys together; at least one.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a cache keeps at least one entry, not {size}")
        self._size = size
        self._kept: dict[Hashable, list[_Kept[E]]] = {}
        self._clock = itertools.count()
        self._lock = ForkSafeLock()

    def find(self, key: Hashable, values: Sequence[Any]) -> E | None:
        """The entry for `values`; None if there is none."""
        for kept in self._kept.get(key, ()):
            if kept.entry.guard.fits(values):
                kept.used = next(self._clock)
                return kept.entry
        return None

    def known(self, key: Hashable) -> list[E]:
        """All entries of `key`, oldest first."""
        return [kept.entry for kept in self._kept.get(key, ())]

    def add(self, key: Hashable, entry: E) -> None:
        """Keep `entry`; if that is one too many, the one that was not used for longest goes."""
        with self._lock:
            made = _Kept(entry, next(self._clock))
            self._kept[key] = [*self._kept.get(key, ()), made]
            while len(self) > self._size:
                self._give_one_up()

    def _give_one_up(self) -> None:
        key, oldest = min(
            ((key, kept) for key, entries in self._kept.items() for kept in entries),
            key=lambda found: found[1].used,
        )
        left = [kept for kept in self._kept[key] if kept is not oldest]
        if left:
            self._kept[key] = left
        else:
            del self._kept[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
