"""Chance: every choice of a drawing, through one small interface.

In: a `random.Random`, a real one for a seed or Hypothesis's, which shrinks; a program's place among all
programs of a campaign. Out: choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
HAND = 3
"""So many items of each deck are meant for one program; one that takes more takes those of the next."""


class Chance:
    """Choices. What stands first in a list is the simplest, for whoever shrinks.

    Args:
        source: of all choices but those of `deal`.
        place: of the program among all others; None: `deal` is `pick`.
    """

    def __init__(self, source: Random, place: int | None = None) -> None:
        self._source = source
        self._place = place
        self._dealt: Counter[str] = Counter()

    def flip(self, share: float) -> bool:
        """True in this share of cases."""
        return self._source.random() < share

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return self._source.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each as likely."""
        return items[self._source.randrange(len(items))]

    def deal(self, deck: str, items: Sequence[T]) -> T:
        """One of the items, each as likely. Programs whose places follow each other go through all of them
        before one comes again, in another order each time: independent choices leave some out for long.
        """
        if self._place is None:
            return self.pick(items)
        self._dealt[deck] += 1
        times, place = divmod(self._place * HAND + self._dealt[deck] - 1, len(items))
        order = Random(f"{deck}:{times}").sample(range(len(items)), len(items))
        return items[order[place]]

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
