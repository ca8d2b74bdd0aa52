"""Whole training steps: forward, loss, backward, AdamW, three batches in turn, one way to compile a process.

In: a way of `WAYS`, a model of `trained_models.TRAINED`, a device. Out: seconds of the first steps and of a
steady one, bytes of memory, the loss after the same number of steps, and how often retrograd ran something as
eager does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .clock import FEWEST_ROUNDS, synchronize
from .kernels import profiled
from .steps import compiled_otherwise, load_compilers
from .trained_models import Trained, trained

Step = Callable[[Any], torch.Tensor]
#: Steps before the clock of steady ones. CUDA graphs of both compilers are recorded by then, for each batch.
WARM_UP = 12


def _eager(model: Any) -> Any:
    return model


def _stock(mode: str | None) -> Callable[[Any], Any]:
    return lambda model: torch.compile(model, mode=mode)


def _retrograd(mode: str | None) -> Callable[[Any], Any]:
    def compile_model(model: Any) -> Any:
        import retrograd

        return retrograd.compile(model, mode=mode)

    return compile_model


#: Steps by which every way has compiled.
STARTING = 3
#: name of a way: what compiles the model. The last two compile it otherwise: see `_around` and `_whole`.
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": _eager,
    "stock": _stock(None),
    "stock-reduce-overhead": _stock("reduce-overhead"),
    "retrograd-compile": _retrograd(None),
    "retrograd-reduce-overhead": _retrograd("reduce-overhead"),
    "retrograd-live": _eager,
    "retrograd-step": _eager,
}


def _around(way: str) -> Callable[[], AbstractContextManager[Any]]:
    """The context that a backward runs in."""
    if way != "retrograd-live":
        return nullcontext
    import retrograd

    context = retrograd.compiled_autograd(backend="inductor")
    return lambda: context


def _whole(way: str, step: Step) -> Step:
    """The step, compiled as a whole if that is the way."""
    if way != "retrograd-step":
        return step
    import retrograd

    compiled: Step = retrograd.compile_step(backend="inductor")(step)
    return compiled


def steps_of(way: str, made: Trained, device: str) -> Step:
    """The step of a way; it works on the model that was made."""
    compiled, context = WAYS[way](made.model), _around(way)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with made.precision(device):
            loss = made.loss(compiled, batch)
        with context():
            loss.backward()
        optimizer.step()
        return loss.detach()

    return _whole(way, step)


def training(subject: str, model: str, device: str = "cpu", seconds: float = 6.0) -> dict[str, float]:
    """Train `model` by the way `subject`.

    Args:
        subject: a name of `WAYS`.
        model: a name of `TRAINED`.
        device: "cpu" or "cuda".
        seconds: time after which no further steady step begins.

    Returns:
        "start", of the first three steps together (`compile_step` runs the first one as it is), and "step"
        (median) in seconds; on a GPU "allocated" and "reserved", the peaks of steady
        steps in bytes, and "kernels", the seconds that the work of a step takes on the device; "loss" after
        the warm-up; "fallbacks", the number of reasons in retrograd's report.
    """
    made = trained(model, device)
    _start(made, device)
    step, batches = steps_of(subject, made, device), made.batches
    run = _timed(step, device)
    warming = [run(batches[number % len(batches)]) for number in range(WARM_UP)]
    found = {"start": sum(took for took, _ in warming[:STARTING]), "loss": float(warming[-1][1])}
    del warming
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < FEWEST_ROUNDS or (time.perf_counter() < end and len(taken) < 200):
        taken.append(run(batches[len(taken) % len(batches)])[0])
    found["step"] = statistics.median(taken)
    if device == "cuda":
        found["allocated"] = float(torch.cuda.max_memory_allocated())
        found["reserved"] = float(torch.cuda.max_memory_reserved())
        found["kernels"] = statistics.median(profiled(lambda: run(batches[0])) for _ in range(3))
    found["fallbacks"] = float(len(compiled_otherwise(subject)))
    return found


def _start(made: Trained, device: str) -> None:
    """What no way is to pay for: torch's threads and kernels, the imports of a compiler."""
    with made.precision(device):
        made.loss(made.model, made.batches[0]).backward()
    made.model.zero_grad()
    load_compilers()
    synchronize(device)


def _timed(step: Step, device: str) -> Callable[[Any], tuple[float, torch.Tensor]]:
    """A step that says how many seconds it took, and its loss, which outlives the next replay of a graph."""

    def run(batch: Any) -> tuple[float, torch.Tensor]:
        synchronize(device)
        start = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        loss = step(batch)
        synchronize(device)
        return time.perf_counter() - start, loss.clone()

    return run
