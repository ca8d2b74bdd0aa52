"""Whole training steps without an optimizer, the first of a process and steady ones.

In: subjects (live ones of `subjects`, whose forward is eager, and compiled ones of `aot_subjects`), a
workload's name and a device. Out: seconds, of a forward with its backward ("step") and of the backward alone.
"""

from __future__ import annotations

import importlib
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import aot_subjects, subjects
from .clock import medians, synchronize
from .models import Workload, workload
from .subjects import Context

#: Steps before the clock: CUDA graphs run once, record once and then replay, forward and backward in turn.
WARM_UP = 6


@dataclass(frozen=True)
class Training:
    """One subject's way through a workload."""

    program: Workload
    loss: Callable[[], torch.Tensor]
    context: Context
    device: str

    def step(self) -> float:
        """Seconds of forward and backward, with what the subject does around the backward."""
        self.program.clear()
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.loss()
        with self.context():
            loss.backward()
        synchronize(self.device)
        return time.perf_counter() - start

    def backward(self) -> float:
        """Seconds of the backward alone, behind a forward that has ended."""
        self.program.clear()
        loss = self.loss()
        synchronize(self.device)
        start = time.perf_counter()
        with self.context():
            loss.backward()
        synchronize(self.device)
        return time.perf_counter() - start


def training(subject: str, program: Workload, device: str) -> Training:
    """Prepare a subject; nothing is compiled yet. It works on `program` itself."""
    if subject in subjects.SUBJECTS:
        return Training(program, program.loss, subjects.SUBJECTS[subject](), device)
    compiled = aot_subjects.SUBJECTS[subject](loss_function(program))
    return Training(program, lambda: compiled(program.inputs), subjects.SUBJECTS["eager"](), device)


def loss_function(program: Workload) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss as a function of the input, with a code object of its own.

    Dynamo keeps what it compiled by code object: subjects that share one would wait for each other's guards.
    """
    model, objective = program.model, program.objective

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        return objective(model(inputs))

    code = loss.__code__.replace()
    return types.FunctionType(code, loss.__globals__, "loss", None, loss.__closure__)


def first_step(subject: str, model: str = "small", device: str = "cpu") -> float:
    """Seconds of the first step of this process: everything that compiling takes, with cold caches.

    One eager step goes first, so that no subject pays for starting torch's autograd threads and kernels.
    """
    program = workload(model, device)
    training("eager", program, device).step()
    load_compilers()
    return training(subject, program, device).step()


def load_compilers() -> None:
    """Import what every subject imports when it compiles first, before any clock starts."""
    for name in ("torch._inductor.compile_fx", *subjects.present(["retrograd.dynamo"])):
        importlib.import_module(name)


def steady(
    subjects: Sequence[str],
    model: str = "small",
    device: str = "cpu",
    rounds: int = 100,
    seconds: float = 20.0,
) -> dict[str, float]:
    """Median seconds of a warm step and of its backward, of all subjects, taking turns in every round.

    At most one subject that compiles live: torch's cache of captured graphs is one for the whole process.
    Each has a model of its own, with the same weights.
    """
    program = workload(model, device)
    timers: dict[str, Callable[[], float]] = {}
    for name in subjects:
        trained = training(name, program.twin(), device)
        for _ in range(WARM_UP):
            trained.step()
        timers |= {f"{name} step": trained.step, f"{name} backward": trained.backward}
    return medians(timers, rounds, seconds)


def compiled_otherwise(asked: str = "") -> list[str]:
    """Reasons why retrograd, in this process, ran anything as eager does or otherwise than `asked`."""
    if not subjects.present(["retrograd"]):
        return []
    import retrograd.events

    report = retrograd.explain()
    reasons: list[Any] = [*report.fallbacks, *report.notes]
    # Some measurements are of programs that never repeat, or are too small for a compiler.
    reasons = [reason for reason in reasons if reason.code not in ("nothing-repeats", "slower-than-eager")]
    if (
        "retrograd" in asked
        and "-cudagraphs" in asked
        and not retrograd.events.counters["cuda_graph_replays"]
    ):
        reasons.append(f"{report}\nno CUDA graph was replayed")
    return [str(reason) for reason in reasons]


def interpreted_segments() -> list[str]:
    """Why segments have no code, in the backward that ran most in retrograd's live path."""
    if not subjects.present(["retrograd"]):
        return []
    import retrograd
    from retrograd.graph.backward_graph import call_of

    most = max(retrograd.explain().backwards, key=lambda backward: backward.runs, default=None)
    if most is None:
        return []
    last = {one.segment: one for one in most.lowerings}
    calls = [call for call in most.schedule.opaque_calls if call_of(call.node).kind.is_functional]
    return [call.reason for call in calls] + [one.because for one in last.values() if one.is_interpreted]
