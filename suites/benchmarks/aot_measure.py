"""The measurements of compiled functions; each runs in this process, which is meant to be a fresh one.

In: a subject of `aot_subjects`, perhaps one to measure beside it, and a device. Out: seconds or bytes by
subject.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .allocator import allocator_peak_of
from .aot_subjects import SUBJECTS
from .clock import synchronize, taking_turns
from .models import Workload, workload


def five_lines(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A function so small that a call of it is nothing but overhead."""
    a = x * w
    b = a.sin()
    c = b + x
    d = c * 2
    return d.relu()


def aot_forward_overhead(
    subject: str, beside: str = "stock-compile-aot_eager", device: str = "cpu", rounds: int = 100
) -> dict[str, float]:
    """Median seconds of a forward of `five_lines` on 8 elements: of eager, `subject` and `beside`."""
    x, w = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    programs: dict[str, Callable[[], object]] = {}
    for name in ("eager", subject, beside):
        function = SUBJECTS[name](five_lines)
        for _ in range(5):
            function(x, w).sum().backward()
        programs[name] = lambda function=function: function(x, w)  # type: ignore[misc]
    return taking_turns(programs, device, rounds, calls=100)


def aot_capture_partition(
    subject: str = "retrograd-aot-trace",
    beside: str = "stock-aot",
    model: str = "deep",
    device: str = "cpu",
    rounds: int = 3,
) -> dict[str, float]:
    """Median seconds until both graphs of a module are there, of `subject` and of `beside`, taking turns.

    One small module goes first, so that nobody pays for what is loaded once. The forward runs once,
    uncompiled.
    """

    def first_call(name: str, program: Workload) -> object:
        return SUBJECTS[name](copy.deepcopy(program.model))(program.inputs)

    for name in (subject, beside):
        first_call(name, workload("small", device))
    program = workload(model, device)
    turns: dict[str, Callable[[], object]] = {
        name: lambda name=name: first_call(name, program)  # type: ignore[misc]
        for name in (subject, beside)
    }
    return taking_turns(turns, device, rounds)


def training_steps(names: tuple[str, ...], model: str, device: str) -> dict[str, Callable[[], object]]:
    """One training step without an optimizer for each subject, warm."""
    steps: dict[str, Callable[[], object]] = {}
    program = workload(model, device)
    for name in names:
        twin = Workload(copy.deepcopy(program.model), program.inputs)
        compiled = Workload(SUBJECTS[name](twin.model), program.inputs)

        def step(twin: Workload = twin, compiled: Workload = compiled) -> None:
            compiled.loss().backward()
            twin.clear()

        for _ in range(3):
            step()
        steps[name] = step
    return steps


def aot_steady_step(
    subject: str,
    beside: str = "stock-compile-inductor",
    model: str = "small",
    device: str = "cpu",
    rounds: int = 100,
) -> dict[str, float]:
    """Median seconds of a warm forward and backward: of eager, `subject` and `beside`, taking turns."""
    return taking_turns(training_steps(("eager", subject, beside), model, device), device, rounds)


def aot_peak_memory(subject: str, model: str = "wide", device: str = "cpu") -> dict[str, int]:
    """Peak bytes of a warm forward and backward, of eager and of `subject`; parameters are not counted."""
    count = cuda_peak_of if device == "cuda" else cpu_peak_of
    return {name: count(step) for name, step in training_steps(("eager", subject), model, device).items()}


def cpu_peak_of(step: Callable[[], Any]) -> int:
    """Most bytes of torch's CPU allocator in use at any moment of `step`, less those before it."""

    def run(starts: Callable[[], None]) -> None:
        starts()
        step()

    return allocator_peak_of(run)


def cuda_peak_of(step: Callable[[], Any]) -> int:
    """Most bytes of device memory allocated at any moment of `step`, less those before it."""
    synchronize("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize("cuda")
    return torch.cuda.max_memory_allocated() - before
