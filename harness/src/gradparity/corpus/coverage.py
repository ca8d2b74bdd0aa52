"""What a live backward can contain, and which scenarios show it.

In: registered scenarios: their tags and topics (the modules that they stand in). Out: for each area, its
scenarios. An area is one thing that can hang from a `grad_fn`, or one way of running it; a scenario may
belong to several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradparity.corpus.scenario import Scenario


@dataclass(frozen=True)
class Area:
    """A scenario belongs here if it has one of the tags or stands in one of the topics."""

    name: str
    tags: frozenset[str]
    topics: frozenset[str] = frozenset()

    def has(self, scenario: Scenario) -> bool:
        """Whether the scenario belongs here."""
        topic = scenario.body.__module__.rpartition(".")[2]
        return topic in self.topics or not self.tags.isdisjoint(scenario.tags)


def _area(name: str, *tags: str, topics: tuple[str, ...] = ()) -> Area:
    return Area(name, frozenset(tags), frozenset(topics))


AREAS = (
    _area(
        "0 order, roots, graphs that are kept",
        "order",
        "branching",
        "roots",
        "inputs",
        "retain-graph",
        topics=("kept_graphs",),
    ),
    _area("1 compiled forwards", "compiled"),
    _area("2 custom functions", "function", topics=("custom_functions", "function_edges")),
    _area("3 tensor subclasses", "subclass", topics=("subclass_kinds",)),
    _area(
        "4 views, in-place, accumulation", "views", "in-place", "accumulation", "sparse", "aliasing", "dtype"
    ),
    _area("5 higher order", "higher-order", "func", topics=("second_order", "transforms")),
    _area(
        "6 hooks and callbacks", "hooks", "callbacks", "saved", "engine-state", "retain-grad", "side-effects"
    ),
    _area("7 reentrancy and threads", "reentrant", "checkpoint", "threads", topics=("nested_backwards",)),
    _area("8 modes", "modes", "autocast", "islands", topics=("modes", "mode_switches")),
    _area("9 dynamic shapes", "shapes", "steps", "data-dependent"),
    _area("10 devices and memory", "memory", "device"),
    _area("11 compiled ahead of time", "aot"),
    _area("12 equal steps, which may be replayed", "replay"),
    _area("training scripts", "training"),
)
"""In the order in which a reader would ask. Logs and switches are no programs: they have tests."""


def by_area(scenarios: Mapping[str, Scenario]) -> dict[str, list[str]]:
    """The names of each area's scenarios."""
    return {area.name: [name for name, item in scenarios.items() if area.has(item)] for area in AREAS}


def outside(scenarios: Mapping[str, Scenario]) -> list[str]:
    """The names of scenarios that belong to no area."""
    return [name for name, item in scenarios.items() if not any(area.has(item) for area in AREAS)]
