"""Chance: every choice of a drawing, through one small interface.

In: a `random.Random`, a real one for a seed or Hypothesis's, which shrinks. Out: choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """Choices. What stands first in a list is the simplest, for whoever shrinks."""

    def __init__(self, source: Random) -> None:
        self._source = source

    def flip(self, share: float) -> bool:
        """True in this share of cases."""
        return self._source.random() < share

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return self._source.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each as likely."""
        return items[self._source.randrange(len(items))]

    def weighted(self, weights: Mapping[T, float]) -> T:
        """One of the keys, by weight."""
        items = list(weights)
        return self._source.choices(items, [weights[item] for item in items])[0]

    def some(self, items: Sequence[T], least: int = 1) -> list[T]:
        """At least so many of the items, in their order."""
        count = self._source.randint(min(least, len(items)), len(items))
        places = sorted(self._source.sample(range(len(items)), count))
        return [items[place] for place in places]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All items, in any order."""
        return self._source.sample(list(items), len(items))
