"""Warnings: what eager warns of each time, the subject warns of too.

In: a program under a subject. Out: a Finding that names the first warning of eager that is not given. What
the subject warns of besides is its own matter.
"""

from __future__ import annotations

import re

import torch

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.outcome import Outcome
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

PLACES = re.compile(r"\(Triggered internally at .*\)|0x[0-9a-f]+|\d+")


def warned(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares warnings by category and text, places and numbers left out. torch warns each time here, also
    of what it says once a process.
    """
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        eager = Eager("eager")
        usual = _given(_run(program, eager, device)) & _given(_run(program, eager, device))
        missing = usual - _given(_run(program, subject, device))
    finally:
        torch.set_warn_always(before)
    if not missing:
        return None
    category, text = min(missing)
    return Finding(Verdict.DIVERGE, "warning", f"eager warns, the subject does not: {category}: {text[:200]}")


def _given(outcome: Outcome) -> set[tuple[str, str]]:
    return {(item.category, PLACES.sub("_", item.text)) for item in outcome.warnings}


def _run(program: Program, subject: Subject, device: torch.device) -> Outcome:
    return observe(program.case, program.body, subject, torch.float32, device)
