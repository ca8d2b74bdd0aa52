"""Leaks: tensors that stay alive after each run.

In: a program under a subject. Out: a Finding if every further run leaves more live tensors, or more bytes
in them, and eager's does not.
"""

from __future__ import annotations

import gc
from itertools import pairwise

import torch

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

WARM = 2
RUNS = 3


def leaks(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Counts live tensors after each of some runs; the first runs fill caches and do not count."""
    grown = growth(program, subject, device)
    if min(grown) <= 0:
        return None
    eager = growth(program, Eager("eager"), device)
    if min(grown) <= max(eager):
        return None
    reason = f"each further run leaves {grown} more live tensors; eager's {eager}"
    return Finding(Verdict.DIVERGE, "leak", reason)


def growth(program: Program, subject: Subject, device: torch.device) -> list[int]:
    """By how many tensors each run, after the first ones, leaves more than the run before."""
    counts = []
    for _ in range(WARM + RUNS):
        observe(program.case, program.body, subject, torch.float32, device)
        counts.append(live_tensors())
    warm = counts[WARM - 1 :]
    return [after - before for before, after in pairwise(warm)]


def live_tensors() -> int:
    """Tensors that the garbage collector knows, after a collection."""
    gc.collect()
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
