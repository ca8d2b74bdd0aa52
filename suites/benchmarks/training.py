"""Whole training steps: forward, loss, backward, AdamW, three batches in turn, one way to compile a process.

In: a way of `WAYS`, a model of `trained_models.TRAINED`, a device. Out: seconds of the first steps and of a
steady one, bytes of memory, the loss after the same number of steps, and how often retrograd ran something as
eager does.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .clock import medians, synchronize
from .kernels import profiled
from .steps import compiled_otherwise, interpreted_segments, load_compilers
from .trained_models import Trained, trained

Step = Callable[[Any], torch.Tensor]
#: Steps before the clock of steady ones. By then CUDA graphs of both compilers are recorded, for each batch,
#: and a compiled step has been measured against eager, with eager's memory.
WARM_UP = 20
MOST_ROUNDS = 200


@dataclass(frozen=True)
class Way:
    """How a training step is compiled.

    Attributes:
        model: what compiles the model.
        backward: makes the context that backwards run in.
        step: what compiles the whole step.
    """

    model: Callable[[Any], Any] = lambda model: model
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    step: Callable[[Step], Step] = lambda step: step


def _retrograd(name: str, **options: Any) -> Callable[..., Any]:
    """A function of retrograd, which is imported when it is called, so that stock runs without it."""
    return lambda *args: getattr(importlib.import_module("retrograd"), name)(*args, **options)


def _stock_like_eager(model: Any, **options: Any) -> Any:
    """``torch.compile`` with a backward outside autocast, as eager's is. By default it runs inside, in other
    arithmetic; torch means to change that (pytorch#177287). The setting is the process's, which has one way.
    """
    importlib.import_module("torch._functorch.config").backward_pass_autocast = "off"
    return torch.compile(model, **options)


WAYS: dict[str, Way] = {
    "eager": Way(),
    "stock": Way(torch.compile),
    "stock-reduce-overhead": Way(partial(torch.compile, mode="reduce-overhead")),
    "stock-like-eager": Way(_stock_like_eager),
    "stock-like-eager-reduce-overhead": Way(partial(_stock_like_eager, mode="reduce-overhead")),
    "retrograd-compile": Way(_retrograd("compile")),
    "retrograd-compile-whole": Way(_retrograd("compile", options={"whole_after": WARM_UP - 2})),
    "retrograd-reduce-overhead": Way(_retrograd("compile", mode="reduce-overhead")),
    "retrograd-live": Way(backward=_retrograd("compiled_autograd", backend="inductor")),
    "retrograd-step": Way(step=_retrograd("compile_step", backend="inductor")),
    "retrograd-step-reduce-overhead": Way(
        step=_retrograd("compile_step", backend="inductor", cudagraphs=True)
    ),
}
#: Steps by which every way has compiled.
STARTING = 3


def step_of(way: Way, made: Trained, device: str) -> Step:
    """The step of a way; it works on the model that was made."""
    compiled, context = way.model(made.model), way.backward()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with made.precision(device):
            loss = made.loss(compiled, batch)
        with context:
            loss.backward()
        optimizer.step()
        return loss.detach()

    return way.step(step)


class Training:
    """A model that is trained by the way `subject`, from the moment it has been warmed up.

    Arguments:
        subject: a name of `WAYS`.
        model: a name of `TRAINED`.
        device: "cpu" or "cuda".

    Attributes:
        first: "start", the seconds of the first three steps together (`compile_step` runs the first one as it
            is), and "loss" after the warm-up.
    """

    def __init__(self, subject: str, model: str, device: str = "cpu") -> None:
        made = trained(model, device)
        _start(made, device)
        self._subject, self._device = subject, device
        self._run = _timed(step_of(WAYS[subject], made, device), device)
        self._turns = itertools.cycle(made.batches)
        warming = [self._run(next(self._turns)) for _ in range(WARM_UP)]
        self.first = {"start": sum(took for took, _ in warming[:STARTING]), "loss": float(warming[-1][1])}
        del warming
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._resting = torch.cuda.memory_allocated()

    def step(self) -> float:
        """Seconds of one steady step."""
        return self._run(next(self._turns))[0]

    def last(self) -> dict[str, float]:
        """What the steps took besides: "fallbacks", how much, as retrograd's report says, ran as eager runs
        it or without code; on a GPU "resting", the bytes allocated between two steps, "allocated" and
        "reserved", the peaks of steady steps, and "kernels", the seconds that a step's work takes there."""
        otherwise = [*compiled_otherwise(self._subject), *interpreted_segments()]
        found = {"fallbacks": float(len(otherwise))}
        if self._device == "cuda":
            found["resting"] = float(self._resting)
            found["allocated"] = float(torch.cuda.max_memory_allocated())
            found["reserved"] = float(torch.cuda.max_memory_reserved())
            found["kernels"] = statistics.median(profiled(self.step) for _ in range(3))
        return found


def training(subject: str, model: str, device: str = "cpu", seconds: float = 6.0) -> dict[str, float]:
    """Train `model` by the way `subject`: the figures of `Training`, and "step", the median of steady steps
    in seconds. After `seconds` no further step begins."""
    one = Training(subject, model, device)
    return one.first | medians({"step": one.step}, MOST_ROUNDS, seconds) | one.last()


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
