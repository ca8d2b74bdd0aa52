"""Slow: the time of a run, once everything is compiled.

In: a program under a subject. Out: a Finding of verdict SLOW if the subject takes far longer than eager,
twice. Both run in turns in this process; the fastest run of each counts, which what else the machine does
disturbs least.
"""

from __future__ import annotations

import time

import torch

from gradparity.checks.cost import seconds
from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

MULTIPLE = 1.2
"""A run may take so many times as long as eager's."""
FLOOR = 0.005
"""Seconds that eager must take: of a shorter program, calls and guards are most of the time."""
WARM, LEAST, MOST, BUDGET = 3, 4, 12, 5.0
"""Runs until the subject must have compiled everything; runs of each for one measurement, at least and at
most, and the seconds after which no more are added.
"""


def slow(program: Program, subject: Subject, device: torch.device, floor: float = FLOOR) -> Finding | None:
    """Compares the fastest runs. A find is measured once more, and both measurements must agree on it."""
    if seconds(program, Eager("eager"), device)[0] < floor:
        return None
    for _ in range(WARM):
        if observe(program.case, program.body, subject, torch.float32, device).compiles == 0:
            break
    for _ in range(2):
        eager, mine = _fastest(program, subject, device)
        if eager < floor or mine <= MULTIPLE * eager:
            return None
    told = f"{1e3 * mine:.2f} ms, eager {1e3 * eager:.2f}: {mine / eager:.2f} times that; allowed {MULTIPLE}"
    return Finding(Verdict.SLOW, "time", told)


def _fastest(program: Program, subject: Subject, device: torch.device) -> tuple[float, float]:
    """The seconds of eager's fastest run, and of the subject's. Runs that compile do not count; if all do,
    the subject's time is 0: what compiles for ever is a matter of the check `recompiles`.
    """
    eager, mine = [], []
    until = time.monotonic() + BUDGET
    for number in range(MOST):
        eager.append(seconds(program, Eager("eager"), device)[0])
        taken, outcome = seconds(program, subject, device)
        mine += [] if outcome.compiles else [taken]
        if number + 1 >= LEAST and time.monotonic() > until:
            break
    return min(eager), min(mine, default=0.0)
