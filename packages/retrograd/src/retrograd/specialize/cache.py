"""A bounded store of what was compiled.

In: a key, which must be equal, and values, for which a guard must hold. Out: the variant for them, or None.
When there are too many variants, the least recently used is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retrograd.errors import Reason
from retrograd.process import ForkSafeLock


class Guard(Protocol):
    """What must hold for a variant to be used."""

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether it holds for `values`."""
        ...


@dataclass(eq=False)
class Variant:
    """What is known about one kind of call.

    Attributes:
        guard: when it applies, of the calls with its key; None: to all of them.
        run: the code, for flat inputs; None: such calls run eagerly, for `reason`.
        failures: how often the code has raised where eager did not.
        used: when it was used last.
    """

    guard: Guard | None
    run: Callable[[Sequence[Any]], Any] | None
    reason: Reason | None = None
    failures: int = 0
    used: int = 0


class GuardedCache:
    """Variants by key, and of those of one key, the first whose guard holds.

    Args:
        size: how many variants are kept, of all keys together; at least one.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a cache keeps at least one entry, not {size}")
        self._size = size
        self._kept: dict[Hashable, list[Variant]] = {}
        self._clock = itertools.count()
        self._lock = ForkSafeLock()

    def find(self, key: Hashable, values: Sequence[Any]) -> Variant | None:
        """The variant for `values`; None if there is none."""
        for variant in self._kept.get(key, ()):
            if variant.guard is None or variant.guard.fits(values):
                variant.used = next(self._clock)
                return variant
        return None

    def known(self, key: Hashable) -> Sequence[Variant]:
        """All variants of `key`, oldest first."""
        return self._kept.get(key, ())

    def add(self, key: Hashable, variant: Variant) -> None:
        """Keep `variant`; if that is one too many, drop the least recently used."""
        with self._lock:
            variant.used = next(self._clock)
            self._kept[key] = [*self.known(key), variant]
            if len(self) > self._size:
                key, oldest = min(
                    ((key, one) for key, several in self._kept.items() for one in several),
                    key=lambda found: found[1].used,
                )
                self._kept[key] = [one for one in self._kept[key] if one is not oldest]
                if not self._kept[key]:
                    del self._kept[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
