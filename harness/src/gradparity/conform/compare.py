"""compare: two conformance runs of a backend, case by case.

In: two `Conformance`. Out: a `Change`: the cases that fail now, those that agreed and do not, those that are
mended, how many only one of the runs has, and whether a level is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradparity.conform.outcome import FAILED, PASSED, Conformance, Result


@dataclass(frozen=True)
class Change:
    """What the second run has that the first has not. `broken`, `unlike` and `mended` are results of the
    second run: they fail now; they passed, and neither pass nor fail now; they failed. `only_before` and
    `only_after` count cases that one run alone has, because a time limit ended the other. `lower`: whether
    the second reaches a lower level.
    """

    broken: tuple[Result, ...]
    unlike: tuple[Result, ...]
    mended: tuple[Result, ...]
    only_before: int
    only_after: int
    lower: bool

    @property
    def is_loss(self) -> bool:
        """Whether the second run is worse in anything."""
        return bool(self.broken or self.unlike or self.lower)


def changed(before: Conformance, after: Conformance) -> Change:
    """Compares the results of cases that both runs have. A case fails if it does so at any level."""
    old, new = _worst(before), _worst(after)
    both = [(old[case], new[case]) for case in sorted(old.keys() & new.keys())]
    return Change(
        tuple(late for early, late in both if early.result != FAILED and late.result == FAILED),
        tuple(late for early, late in both if early.result == PASSED and late.result not in (PASSED, FAILED)),
        tuple(late for early, late in both if early.result == FAILED and late.result != FAILED),
        len(old.keys() - new.keys()),
        len(new.keys() - old.keys()),
        after.reached < before.reached,
    )


def _worst(found: Conformance) -> dict[str, Result]:
    """By case, its failure; else a result other than passed; else any."""
    items = sorted(found.results, key=lambda item: (item.result == FAILED, item.result != PASSED))
    return {item.case: item for item in items}
