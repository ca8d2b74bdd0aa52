"""What can be reached in a graph of any kind.

In: where to begin, and what follows each thing. Out: all that is reached, in order of discovery.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Thing = TypeVar("Thing", bound=Hashable)


def reached(start: Iterable[Thing], following: Callable[[Thing], Iterable[Thing]]) -> dict[Thing, None]:
    """`start` and all that follows from it, nearest first."""
    found = dict.fromkeys(start)
    waiting = list(found)
    for thing in waiting:  # grows while it is read
        for other in following(thing):
            if other not in found:
                found[other] = None
                waiting.append(other)
    return found
