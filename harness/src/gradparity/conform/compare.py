"""compare: two conformance runs of a backend, case by case.

In: two `Conformance`. Out: a `Change`: the cases that fail now, those that are mended, and how many only
one of the runs has.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradparity.conform.outcome import FAILED, Conformance, Result


@dataclass(frozen=True)
class Change:
    """What the second run has that the first has not. `broken` and `mended` are results of the second run;
    `only_before` and `only_after` count cases that one run alone has, because a time limit ended the other.
    """

    broken: tuple[Result, ...]
    mended: tuple[Result, ...]
    only_before: int
    only_after: int


def changed(before: Conformance, after: Conformance) -> Change:
    """Compares the results of cases that both runs have. A case fails if it does so at any level."""
    old, new = _worst(before), _worst(after)
    both = [(old[case], new[case]) for case in sorted(old.keys() & new.keys())]
    return Change(
        tuple(late for early, late in both if early.result != FAILED and late.result == FAILED),
        tuple(late for early, late in both if early.result == FAILED and late.result != FAILED),
        len(old.keys() - new.keys()),
        len(new.keys() - old.keys()),
    )


def _worst(found: Conformance) -> dict[str, Result]:
    """By case, its failure, or any result."""
    items = sorted(found.results, key=lambda item: item.result == FAILED)
    return {item.case: item for item in items}
