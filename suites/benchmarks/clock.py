"""Clocks: waiting for a device, and the median over rounds in which several programs take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def taking_turns(
    programs: Mapping[str, Callable[[], object]], device: str, rounds: int, calls: int = 1
) -> dict[str, float]:
    """Median seconds of one call of each program; in every round each is called `calls` times in a row."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                program()
            synchronize(device)
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in seconds.items()}
