"""levels: what a backend must keep, from operators to training, and which cases show it.

In: the corpora. Out: the levels, the places of their cases in an order of which every beginning is spread
evenly, and the level of a divergence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import TypeVar

from gradparity.case import SEPARATOR
from gradparity.corpus.registry import corpus
from gradparity.corpus.scenario import registered

T = TypeVar("T")

Place = tuple[str, str]
"""A corpus and a chunk of it."""


@dataclass(frozen=True)
class Level:
    """One level. `corpora`: those whose cases belong to it, `tags`: those of its scenarios."""

    title: str
    corpora: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


LEVELS = (
    Level(
        "values of operators and modules",
        ("op_db", "module_db", "op_db:bfloat16", "op_db:complex64"),
    ),
    Level("gradients, and None where there is none"),
    Level(
        "layouts, aliases, mutation, random numbers",
        ("op_db_cotangents", "module_db_cotangents"),
        _tags(
            "aliasing cotangent determinism dtype dtypes effects identity in-place inplace layout memory "
            "metadata mutation no-grad random side-effects versions views"
        ),
    ),
    Level(
        "hooks, order, checkpoints, Functions",
        ("autograd_function_db", "hop_db"),
        _tags(
            "accumulate branching callbacks checkpoint errors-in-hooks function functions hooks late-hooks "
            "multi-grad node order retain-grad saved saved-tensor-hooks saved-tensors"
        ),
    ),
    Level(
        "double backward, subclasses, threads, several steps",
        tags=_tags(
            "after-the-first-call double-backward forward-mode func functorch higher-order nested reentrant "
            "replay retain-graph second-order shapes steps subclass subclasses threads training vmap"
        ),
    ),
)
"""In their order. A scenario of several counts at the highest, one of none shows gradients."""

SCENARIOS, COMPILED = "scenarios", "compiled"
"""The corpus of scenarios, and the tag of those in which something is compiled."""
MOST = {"op_db:bfloat16": 40, "op_db:complex64": 40, "op_db_cotangents": 60, "module_db_cotangents": 20}
"""So many cases at most of a corpus that others resemble."""
MOST_SCENARIOS = 160
"""So many scenarios at most of a level."""


def level_of_case(address: str) -> int:
    """The level that a case belongs to."""
    name, chunk, *_ = address.split(SEPARATOR)
    if name == SCENARIOS:
        return _levels_of_scenarios().get(chunk, 1)
    return next((number for number, level in enumerate(LEVELS) if name in level.corpora), 1)


def shown_by(address: str) -> tuple[int, ...]:
    """The levels that a case shows something of: a sample of an operator has values and gradients."""
    level = level_of_case(address)
    return (0, 1) if level == 0 else (level,)


def level_of_symptom(symptom: str, address: str) -> int:
    """The level at which a case fails that shows this symptom. Hooks and layouts have a level of their own.
    Wrong gradients and exceptions count where the case stands: it asks for what brings them about.
    """
    level, role = level_of_case(address), symptom.partition("-")[0]
    if role in ("hook", "event"):
        return 3
    if symptom.endswith(("-strides", "-offset")):
        return 2
    if level < 2 and (role in ("state", "random", "invariant") or symptom == "log"):
        return 2
    return max(level, 1) if role == "grad" else level


def places() -> list[Place]:
    """All cases, in turn one of each level."""
    each = [_places(number) for number in range(len(LEVELS))]
    return [place for row in zip_longest(*each) for place in row if place is not None]


def _places(number: int) -> list[Place]:
    names = [name for name, level in _levels_of_scenarios().items() if level == number]
    found = [[(SCENARIOS, name) for name in spread(names)[:MOST_SCENARIOS]]]
    for name in LEVELS[number].corpora:
        found.append([(name, chunk) for chunk in spread(corpus(name).chunks())[: MOST.get(name)]])
    return spread(list(chain.from_iterable(found)))


def spread(items: Sequence[T]) -> list[T]:
    """The items in an order of which every beginning is spread evenly: the halves, the quarters, …"""
    bits = max(len(items) - 1, 0).bit_length()
    turned = (int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(1 << bits))
    return [items[place] for place in turned if place < len(items)]


@cache
def _levels_of_scenarios() -> dict[str, int]:
    """By name, the level of every scenario in which something is compiled."""
    return {name: _highest(item.tags) for name, item in registered().items() if COMPILED in item.tags}


def _highest(tags: Iterable[str]) -> int:
    return max((number for number, level in enumerate(LEVELS) if level.tags.intersection(tags)), default=1)
