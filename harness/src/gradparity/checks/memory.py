"""Memory: the peak of a run, once everything is compiled.

In: a program under a subject. Out: a Finding of verdict MEMORY if the subject's peak is far above eager's
(`memory`), or if it rises although the partitioner is told to save less (`budget`).
"""

from __future__ import annotations

import torch

from gradparity.checks.cost import peak_bytes
from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

MULTIPLE = 1.3
FLOOR = 1 << 16
"""A peak may be so many times the other, plus so many bytes."""

BUDGETS = (0.35, 0.15, 0.05)
"""Shares of what the forward could save, the largest first: torch's `activation_memory_budget`."""


def memory(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares the peaks of a run that finds everything compiled."""
    eager, mine = (_steady_peak(program, item, device) for item in (Eager("eager"), subject))
    return _found("peak-memory", mine, f"peak of {mine} bytes, eager's {eager}", eager)


def budget(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compiles once for each budget. A smaller one may not raise the peak above that of a larger one. What
    compiles nothing knows no budget.
    """
    from torch._functorch import config

    lowest: tuple[int, float] | None = None
    found = None
    for share in BUDGETS:
        with config.patch(activation_memory_budget=share):
            subject.reset(cold=True)
            peak = _steady_peak(program, subject, device)
        if lowest is not None and found is None:
            reason = f"peak of {peak} bytes under a budget of {share}, {lowest[0]} under {lowest[1]}"
            found = _found("peak-by-budget", peak, reason, lowest[0])
        lowest = min(lowest or (peak, share), (peak, share))
    subject.reset(cold=True)
    return found


def _steady_peak(program: Program, subject: Subject, device: torch.device) -> int:
    """The smaller of two runs after the first: a subject may compile once more."""
    observe(program.case, program.body, subject, torch.float32, device)
    return min(peak_bytes(program, subject, device) for _ in range(2))


def _found(symptom: str, mine: int, reason: str, other: int) -> Finding | None:
    if mine <= MULTIPLE * other + FLOOR:
        return None
    told = f"{reason}: {mine / max(other, 1):.2f} times that; allowed {MULTIPLE} times and {FLOOR} bytes"
    return Finding(Verdict.MEMORY, symptom, told)
