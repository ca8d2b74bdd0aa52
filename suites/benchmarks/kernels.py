"""The time that kernels take by themselves: what remains of an eager backward when the host costs nothing.

In: a workload on a GPU. Out: seconds, summed over all that ran on the device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .models import workload

#: What the profiler calls work on the device.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def device_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Time on the device, summed over the events of a trace in Chrome's form."""
    return sum(event["dur"] for event in events if event.get("cat") in ON_DEVICE) / 1e6


def kernel_seconds(model: str, device: str = "cuda", rounds: int = 10) -> dict[str, float]:
    """Median sum of the kernels' own time, of an eager step and of its backward alone."""
    program = workload(model, device)
    for _ in range(3):
        program.loss().backward()
    steps, backwards = [], []
    for _ in range(rounds):
        program.clear()
        steps.append(profiled(lambda: program.loss().backward()))
        program.clear()
        backwards.append(profiled(program.loss().backward))
    return {
        "kernels step": statistics.median(steps),
        "kernels backward": statistics.median(backwards),
    }


def profiled(run: Callable[[], object]) -> float:
    """Seconds on the device of what `run` starts there."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        return device_seconds(json.loads(trace.read_text())["traceEvents"])
