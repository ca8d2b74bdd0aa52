"""The measurements themselves; each runs in this process, which is meant to be a fresh one (see `fresh`).

In: a subject, a workload's name and a device. Out: plain numbers, in seconds or bytes. As a program it prints
them as one line of JSON: `python -m benchmarks.measure first_backward '{"subject": "eager"}'`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Imported for their effect: what every subject imports is loaded before any clock starts.
import torch._dynamo
import torch._functorch.aot_autograd
import torch.fx.experimental.symbolic_shapes

from .allocator import allocator_peak_of
from .aot_measure import aot_capture_partition, aot_forward_overhead, aot_peak_memory, aot_steady_step
from .clock import synchronize
from .cold_starts import cold_start
from .growth import growth
from .host_time import host_time
from .kernels import kernel_seconds
from .models import Workload, workload
from .steps import compiled_otherwise, first_step, load_compilers, steady
from .structures import cost_of_new_structures, growth_by_structures
from .subjects import SUBJECTS, Context
from .training import training
from .turns import together


def timed_backward(program: Workload, context: Context, device: str) -> float:
    """Seconds of one backward, without its forward, with entering and leaving the context."""
    program.clear()
    loss = program.loss()
    synchronize(device)
    start = time.perf_counter()
    with context():
        loss.backward()
    synchronize(device)
    return time.perf_counter() - start


def first_backward(subject: str, model: str = "small", device: str = "cpu") -> float:
    """Seconds of the first backward of this process: capture, tracing and compile, with cold caches.

    One eager backward goes first, so that no subject pays for starting torch's autograd threads and kernels.
    """
    program = workload(model, device)
    timed_backward(program, SUBJECTS["eager"](), device)
    if subject.endswith("inductor") or "-inductor-" in subject:
        load_compilers()
    return timed_backward(program, SUBJECTS[subject](), device)


def steady_backward(
    subject: str, model: str = "small", device: str = "cpu", rounds: int = 200
) -> dict[str, float]:
    """Median seconds of a backward after warm-up, of the subject and of eager, taking turns in every round.

    One subject a process: torch's cache of captured graphs is one for the whole process and would hand one
    compiler's code to another.
    """
    program = workload(model, device)
    contexts = {name: SUBJECTS[name]() for name in ("eager", subject)}
    for context in contexts.values():
        for _ in range(3):
            timed_backward(program, context, device)
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(rounds):
        for name, context in contexts.items():
            seconds[name].append(timed_backward(program, context, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def allocator_peak(program: Workload, context: Context) -> int:
    """Most bytes of torch's CPU allocator in use at any moment of the backward.

    What was allocated before the forward is not counted.
    """

    def forward_and_backward(starts: Callable[[], None]) -> None:
        loss = program.loss()
        starts()
        with context():
            loss.backward()

    return allocator_peak_of(forward_and_backward)


def resident_bytes(field: str) -> int:
    """A field of this process's status in Linux, in bytes: VmRSS is resident now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident_peak(program: Workload, context: Context) -> int:
    """Most bytes resident at any moment of the backward, less those before the forward (Linux)."""
    before = resident_bytes("VmRSS")
    loss = program.loss()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    with context():
        loss.backward()
    return resident_bytes("VmHWM") - before


def cuda_peak(program: Workload, context: Context) -> int:
    """Most bytes of device memory allocated at any moment of the backward, less those before the forward."""
    before = torch.cuda.memory_allocated()
    loss = program.loss()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with context():
        loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_memory(subject: str, model: str = "wide", device: str = "cpu") -> dict[str, int]:
    """Peak bytes of a steady backward, by each way of counting: what was saved, gradients, temporaries.

    Parameters are not counted, being the same for all. The subject is warm: the memory that compiling took is
    not the backward's.
    """
    program = workload(model, device)
    context = SUBJECTS[subject]()
    for _ in range(2):
        timed_backward(program, context, device)
    peaks = {}
    for name, count in COUNTERS[device].items():
        program.clear()
        peaks[name] = count(program, context)
    return peaks


COUNTERS = {"cpu": {"allocator": allocator_peak, "resident": resident_peak}, "cuda": {"cuda": cuda_peak}}
MEASUREMENTS: dict[str, Callable[..., Any]] = {
    measurement.__name__: measurement
    for measurement in (
        first_backward,
        steady_backward,
        peak_memory,
        aot_forward_overhead,
        aot_capture_partition,
        aot_steady_step,
        aot_peak_memory,
        first_step,
        steady,
        kernel_seconds,
        host_time,
        growth,
        cost_of_new_structures,
        growth_by_structures,
        training,
        together,
        cold_start,
    )
}
#: what says itself how often retrograd fell back.
TELLS = {training.__name__, together.__name__, cold_start.__name__}


class CompiledOtherwiseError(RuntimeError):
    """retrograd ran something as eager does: what was measured is not what was asked for."""


def main(measurement: str, arguments: str) -> None:
    """Print what a measurement returns.

    Raises: CompiledOtherwiseError with retrograd's reasons if it fell back.
    """
    torch.set_num_threads(1)
    figures = MEASUREMENTS[measurement](**json.loads(arguments))
    if measurement not in TELLS and (reasons := compiled_otherwise(arguments)):
        raise CompiledOtherwiseError("\n".join(reasons))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
