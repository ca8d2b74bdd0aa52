"""A graph that is read only on demand, and a summary of it that is available before.

In: a function that reads the graph. Out: a `LazyGraph`. The summary holds what every process needs, so a
process that finds the compiled code on disk does not read the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from retrograd.process import cached_property


@dataclass(frozen=True, eq=False)
class Summary:
    """What we need to know of a graph besides its calls.

    Attributes:
        names: of the placeholders.
        inputs: example values of the placeholders.
        results: example values of the outputs; None for an output without one.
        calls: the number of calls.
        targets: the names of the operators that it calls.
        random_devices: the devices whose generators it uses.
        has_effects_besides_random: whether a call has an effect besides its value, not counting random
            numbers and checks that only raise.
    """

    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]
    calls: int
    targets: frozenset[str]
    random_devices: tuple[Any, ...]
    has_effects_besides_random: bool


class LazyGraph:
    """A graph, read on demand.

    Args:
        read: returns the graph.
        summarise: returns its summary.

    Attributes:
        division: the subgraphs that will be compiled separately; None if not decided yet.
        begun: for each graph of `division`, the pending answer of the process that compiles it.
        known_as: its name on disk, which identifies the graph and `division`; None if it has none.
    """

    known_as: str | None = None
    begun: Sequence[Any] = ()

    def __init__(
        self, read: Callable[[], fx.GraphModule], summarise: Callable[[], Summary], division: Any = None
    ) -> None:
        self._read, self._summarise, self.division = read, summarise, division

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The graph itself."""
        return self._read()

    @cached_property
    def summary(self) -> Summary:
        """The summary of the graph."""
        return self._summarise()
