"""Names of checks.

In: a key of `CHECKS`. Out: functions. Raises UnknownNameError for anything else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradparity.checks.cache import cache
from gradparity.checks.interrupts import interrupts
from gradparity.checks.leaks import leaks
from gradparity.checks.memory import budget, memory
from gradparity.checks.metamorphic import metamorphic
from gradparity.checks.reuse import recompiles, reuse
from gradparity.checks.slow import slow
from gradparity.checks.warned import warned
from gradparity.corpus.base import Program
from gradparity.errors import UnknownNameError
from gradparity.subjects.base import Subject
from gradparity.verdict import Finding

Check = Callable[[Program, Subject, torch.device], Finding | None]

CHECKS: dict[str, Check] = {
    "reuse": reuse,
    "recompiles": recompiles,
    "warnings": warned,
    "metamorphic": metamorphic,
    "leaks": leaks,
    "memory": memory,
    "slow": slow,
    "budget": budget,
    "cache": cache,
    "interrupts": interrupts,
}
"""In the order in which they run: the cheap ones first."""

COSTS = frozenset({"memory", "slow", "budget"})
"""Those that measure: a small program shows them nothing."""

MEANINGS: dict[str, str] = {
    "reuse": "code of an earlier call gives what a fresh compilation gives",
    "recompiles": "calls of the same kind compile nothing more",
    "warnings": "what eager warns of, it warns of",
    "metamorphic": "identity hooks, divided losses and reordered statements change nothing",
    "leaks": "no tensor stays alive",
    "memory": "the peak is at most 1.3 times eager's",
    "slow": "a run of 5 ms or more takes at most 1.2 times as long as eager's",
    "budget": "a smaller memory budget does not raise the peak",
    "cache": "a second process with filled caches gives the same",
    "interrupts": "an exception between two instructions of a backward leaves nothing behind",
}
"""By check, what must hold."""


def chosen(names: tuple[str, ...]) -> dict[str, Check]:
    """The checks of these names, in their order; "all" is all of them."""
    unknown = [name for name in names if name not in (*CHECKS, "all")]
    if unknown:
        raise UnknownNameError("check", unknown[0], [*CHECKS, "all"])
    return {name: check for name, check in CHECKS.items() if name in names or "all" in names}
