"""Memory: the peak of a run, once everything is compiled.

In: a program under a subject. Out: a Finding if the subject's peak is far above eager's. On a GPU the
allocator counts; on the host the profiler's events of torch's own allocator do, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import Finding, Verdict

MULTIPLE = 1.5
FLOOR = 1 << 20
"""A peak may be so many times eager's, plus so many bytes."""


def memory(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Compares the peaks of a run that finds everything compiled."""
    peaks = []
    for item in (Eager("eager"), subject):
        observe(program.case, program.body, item, torch.float32, device)
        peaks.append(peak_bytes(lambda item=item: _run(program, item, device), device))  # type: ignore[misc]
    eager, mine = peaks
    if mine <= MULTIPLE * eager + FLOOR:
        return None
    reason = f"peak of {mine} bytes, eager's {eager}; allowed {MULTIPLE} times that and {FLOOR} bytes"
    return Finding(Verdict.DIVERGE, "peak-memory", reason)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes in use at any moment of a run, beyond those in use before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device)) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    return _highest(profile)


def _highest(profile: Any) -> int:
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = highest = 0
    for _, change in changes:
        total += change
        highest = max(highest, total)
    return highest


def _run(program: Program, subject: Subject, device: torch.device) -> None:
    observe(program.case, program.body, subject, torch.float32, device)
