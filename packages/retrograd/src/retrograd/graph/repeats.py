"""Find where a sequence of calls repeats itself, as the layers of a deep model do.

In: one token per call, equal for calls that may stand for one another, and what a cut before each call costs.
Out: `Repeat` values that do not overlap. Time grows with the number of calls, not with its square: periods
are read off the distances at which short runs of tokens come again, and only the most frequent few are tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

#: how many calls are compared together when periods are looked for: enough to tell the places in a layer
#: apart, and fewer than the calls of any layer that is worth a period of its own.
_GRAM = 6

#: how many periods are tried on one stretch of calls.
_TRIED = 6


@dataclass(frozen=True)
class Repeat:
    """`count` times the same `length` calls, one after the other, from `start` on."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """Where the last copy ends."""
        return self.start + self.length * self.count

    def cuts(self) -> range:
        """Where the copies begin, and where the last one ends."""
        return range(self.start, self.stop + 1, self.length)


def find_repeats(
    tokens: Sequence[Hashable], costs: Sequence[float | None], least: int, copies: int = 2
) -> list[Repeat]:
    """The repeats of a sequence, in order.

    Args:
        tokens: one per call.
        costs: what a cut before each call costs, and one after the last (None: no cut is possible there). Of
            all ways to divide a repeat into copies, the one whose cuts are cheapest is taken.
        least: calls that a copy must have; short periods are taken several at a time.
        copies: how many copies a repeat must have, two or more.
    """
    numbers: dict[Hashable, int] = {}
    interned = [numbers.setdefault(token, len(numbers)) for token in tokens]
    found: list[Repeat] = []
    pending = [(0, len(interned))]
    while pending:
        start, stop = pending.pop()
        if stop - start < copies * least:
            continue
        possible = _repeats_within(interned, costs, least, start, stop)
        repeat = max(
            (each for each in possible if each.count >= copies),
            key=lambda each: (each.length * (each.count - 1), -each.length),
            default=None,
        )
        if repeat is not None:
            found.append(repeat)
            pending += [(start, repeat.start), (repeat.stop, stop)]
    return sorted(found, key=lambda each: each.start)


def _repeats_within(
    tokens: Sequence[int], costs: Sequence[float | None], least: int, start: int, stop: int
) -> Iterator[Repeat]:
    """For every period that is tried, the best division of every stretch in which it holds."""
    for period in _periods(tokens, start, stop):
        for first, last in _stretches(tokens, period, start, stop):
            length = period * -(-least // period)
            repeat = _divided(costs, first, last, period, length)
            if repeat is not None:
                yield repeat


def _periods(tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """Distances at which the same few tokens come again, the most frequent first."""
    seen: dict[tuple[int, ...], int] = {}
    votes: Counter[int] = Counter()
    for i in range(start, stop - _GRAM + 1):
        gram = tuple(tokens[i : i + _GRAM])
        if gram in seen:
            votes[i - seen[gram]] += 1
        seen[gram] = i
    return [period for period, _ in votes.most_common(_TRIED)]


def _stretches(tokens: Sequence[int], period: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where every token equals the one a period later, for at least one period."""
    first = start
    for i in range(start, stop - period + 1):
        if i == stop - period or tokens[i] != tokens[i + period]:
            if i - first >= period:
                yield first, i + period
            first = i + 1


def _divided(costs: Sequence[float | None], first: int, last: int, period: int, length: int) -> Repeat | None:
    """Copies of `length` between `first` and `last`, cut where that is cheapest; then as many as possible."""
    best: tuple[tuple[float, int], Repeat] | None = None
    for start in range(first, min(first + period, last)):
        count = (last - start) // length
        if count < 2:
            break
        repeat = Repeat(start, length, count)
        prices = [costs[cut] for cut in repeat.cuts()]
        if any(price is None for price in prices):
            continue
        inner = prices[1:-1]
        rank = (sum(inner) / len(inner), last - first - count * length)  # type: ignore[arg-type]
        if best is None or rank < best[0]:
            best = rank, repeat
    return best[1] if best is not None else None


def boundary_costs(count: int, uses: Sequence[tuple[int, int, float | None]]) -> list[float | None]:
    """What a cut before each of `count` calls costs, and one after the last.

    Args:
        uses: for each value that is used later on: the place of the call that makes it, the place of the last
            call that uses it, and what it costs to hand it over (None: that is not possible).
    """
    change, forbidden = [0.0] * (count + 2), [0] * (count + 2)
    for made, used, cost in uses:
        if cost is None:
            forbidden[made + 1] += 1
            forbidden[used + 1] -= 1
        else:
            change[made + 1] += cost
            change[used + 1] -= cost
    costs: list[float | None] = []
    price, closed = 0.0, 0
    for i in range(count + 1):
        price += change[i]
        closed += forbidden[i]
        costs.append(None if closed else price)
    return costs
