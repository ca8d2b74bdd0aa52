"""What torch's CPU allocator does while something runs.

In: a function. Out: its allocations and releases, exact, from the profiler's events; and their peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


def allocator_peak_of(program: Callable[[Callable[[], Any]], Any]) -> int:
    """Most bytes in use at any moment after `program` called what it is given: the start of what is measured.

    What was allocated before `program` is not counted.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        program(_mark)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    start = next(event["ts"] for event in events if event.get("name") == _START)
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"])
    before = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    return max(e["args"]["Total Allocated"] for e in changes if e["ts"] >= start) - before


_START = "start of what is measured"


def _mark() -> None:
    with torch.profiler.record_function(_START):
        pass
