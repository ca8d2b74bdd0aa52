"""A graph that may not have been read yet, and what is known of it without its calls.

In: a function that gives the graph. Out: a `LazyGraph`. What every process needs is in its summary. So a
process that finds compiled code on disk need not read the graph that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.process import cached_property


@dataclass(frozen=True, eq=False)
class Summary:
    """What is asked of a graph besides its calls.

    Attributes:
        names, inputs: of its placeholders, with their example values.
        results: example values of what it returns; None for what has none.
        calls: how many it makes.
        targets: the names of the operators that it calls.
        random_devices: of which it uses the generators.
        has_effects: whether a call can be seen by other means than its value.
        has_effects_beside_random: the same, besides drawing random numbers and checks that only raise.
    """

    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]
    calls: int
    targets: frozenset[str]
    random_devices: tuple[Any, ...]
    has_effects: bool
    has_effects_besides_random: bool


class LazyGraph:
    """A graph.

    Args:
        read: gives it.
        summarise: gives its summary.

    Attributes:
        division: the parts in which it will be compiled, if they are known already.
        begun: of each graph of `division`, the answer of another process that was asked to compile it.
        known_as: its name on disk, which says all about it and `division`; None if it has none.
    """

    known_as: str | None = None
    begun: Sequence[Any] = ()

    def __init__(
        self, read: Callable[[], fx.GraphModule], summarise: Callable[[fx.GraphModule], Summary]
    ) -> None:
        self._read, self._summarise = read, summarise
        self.division: Any = None

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The graph itself."""
        return self._read()

    @cached_property
    def summary(self) -> Summary:
        """What is known of it."""
        return self._summarise(self.gm)


class KnownGraph(LazyGraph):
    """A graph of which all that code needs is known before it is read."""

    def __init__(self, read: Callable[[], fx.GraphModule], summary: Summary, division: Any) -> None:
        self._read, self.summary, self.division = read, summary, division
