"""Clocks: waiting for a device, and medians over rounds in which several programs take turns."""

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


#: However long a round takes, there are as many.
FEWEST_ROUNDS = 5


def medians(timers: Mapping[str, Callable[[], float]], rounds: int, seconds: float) -> dict[str, float]:
    """Median of what each timer says; all are called once in every round.

    Arguments:
        timers: each runs its program once and returns what that took.
        rounds: how many, at most.
        seconds: time after which no round begins, once there were `FEWEST_ROUNDS`.
    """
    said: dict[str, list[float]] = {name: [] for name in timers}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() - start > seconds:
            break
        for name, timer in timers.items():
            said[name].append(timer())
    return {name: statistics.median(values) for name, values in said.items()}
