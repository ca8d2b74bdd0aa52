"""Reuse: what was compiled before gives what a fresh compile gives, and nothing is compiled a third time.

In: a program under a subject. Out: a Finding with the symptom of what differs, behind "reuse".
"""

from __future__ import annotations

import torch

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.oracles.evidence import Evidence
from gradparity.oracles.judge import judge
from gradparity.outcome import Outcome
from gradparity.subjects.base import Subject
from gradparity.verdict import Finding, Verdict

WARM = 2
"""Runs after which everything that a program needs should be compiled."""


def reuse(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares a run after everything was forgotten with the next one, which finds compiled code."""
    subject.reset(cold=True)
    fresh = _run(program, subject, device)
    reused = _run(program, subject, device)
    found = judge(Evidence(fresh, reused, bitwise=True, own_random=subject.own_random))
    if found.verdict is Verdict.AGREE:
        return None
    reason = f"freshly compiled code and the same code in its next run differ: {found.reason}"
    return Finding(Verdict.DIVERGE, f"reuse {found.symptom}", reason)


def recompiles(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Counts what is compiled in runs that bring nothing new."""
    subject.reset(cold=True)
    counts = [_run(program, subject, device).compiles for _ in range(WARM + 2)]
    if 0 in counts[WARM:]:
        return None
    return Finding(
        Verdict.DIVERGE, "recompiles", f"equal runs in one process compile again and again: {counts} graphs"
    )


def _run(program: Program, subject: Subject, device: torch.device) -> Outcome:
    return observe(program.case, program.body, subject, torch.float32, device)
