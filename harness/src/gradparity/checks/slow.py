"""Slow: the time of a run, once everything is compiled.

In: a program under a subject. Out: a Finding of verdict SLOW if the subject takes far longer than eager,
twice. Both run in turns in this process. The fastest run of each counts: what else the machine does
disturbs it least.
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
WARM, LEAST, MOST, BUDGET = 3, 6, 12, 5.0
"""Runs until the subject must have compiled everything; turns of one measurement, at least and at most, and
the seconds after which no more are added.
"""
ALWAYS = 0.9
"""In this share of turns the subject must be slower than eager just before: the fastest run of one side may
be luck, or that of the other misfortune, when much else runs on the machine.
"""


def slow(program: Program, subject: Subject, device: torch.device, floor: float = FLOOR) -> Finding | None:
    """Compares the fastest runs. A find is measured once more, and both measurements must agree on it."""
    if seconds(program, Eager("eager"), device)[0] < floor:
        return None
    for _ in range(WARM):
        if observe(program.case, program.body, subject, torch.float32, device).compiles == 0:
            break
    for _ in range(2):
        turns = _in_turns(program, subject, device)
        eager, mine = (min(times) for times in zip(*turns, strict=True)) if turns else (0.0, 0.0)
        is_always = sum(one < other for one, other in turns) >= ALWAYS * len(turns)
        if eager < floor or mine <= MULTIPLE * eager or not is_always:
            return None
    told = f"{1e3 * mine:.2f} ms, eager {1e3 * eager:.2f}: {mine / eager:.2f} times that; allowed {MULTIPLE}"
    return Finding(Verdict.SLOW, "time", told)


def _in_turns(program: Program, subject: Subject, device: torch.device) -> list[tuple[float, float]]:
    """The seconds of eager and of the subject, by turns. Turns in which the subject
    compiles do not count: what compiles for ever is a matter of the check `recompiles`.
    """
    turns = []
    until = time.monotonic() + BUDGET
    for number in range(MOST):
        eager, _ = seconds(program, Eager("eager"), device)
        mine, outcome = seconds(program, subject, device)
        turns += [] if outcome.compiles else [(eager, mine)]
        if number + 1 >= LEAST and time.monotonic() > until:
            break
    return turns
