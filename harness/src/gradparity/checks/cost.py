"""Cost: the bytes and the seconds that a program takes from the start of its forward to the end of its
backward.

In: a program, a subject, a device. Out: numbers. The forward starts when the program has first asked the
subject to compile; without that, when its first backward starts. What lies outside is not counted: inputs
that are made before, observations that are read afterwards.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gradparity.corpus.base import Program
from gradparity.observe import Observed, observe
from gradparity.outcome import Outcome
from gradparity.subjects.base import Subject

T = TypeVar("T")
EDGE = "gradparity: an edge of what is measured"


class Measured(Observed):
    """A subject under which a program says when its forward starts and when each of its backwards ends.

    Args:
        subject: runs the program.
        edge: called at the start, and at each end.
    """

    def __init__(self, subject: Subject, edge: Callable[[], None]) -> None:
        self._subject, self._edge = subject, edge
        self._is_started = self._is_ended = False

    def begin(self) -> None:
        """As the subject does."""
        self._subject.begin()

    def compiles(self) -> int:
        """As the subject counts."""
        return self._subject.compiles()

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """As the subject does."""
        return self._subject.wrap_hook(hook)

    def compile(self, target: T) -> T:
        """What the subject compiles. The first such call comes before the forward."""
        made = self._subject.compile(target)
        self._start()
        return made

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The subject's context. Its end may be the end of what is measured."""
        self._start()
        with self._subject.backward():
            yield
        self._end()

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """The subject's step, which contains a forward and a backward."""
        made = self._subject.training_step(step)
        self._start()

        @wraps(made)
        def stepped(*args: Any, **kwargs: Any) -> T:
            result = made(*args, **kwargs)
            self._end()
            return result

        return stepped

    @contextmanager
    def around(self) -> Iterator[None]:
        """The subject's context. A program without a backward ends with it."""
        with self._subject.around():
            yield
            if not self._is_ended:
                self._end()

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._edge()

    def _end(self) -> None:
        self._is_ended = True
        self._edge()


def peak_bytes(program: Program, subject: Subject, device: torch.device) -> int:
    """The most bytes that live storages hold at once while the program runs, beyond those that live at its
    start. On a GPU, torch's allocator counts. On the host, torch's profiler tells of every storage that
    torch's allocator made or freed, whether an operator asked for it or compiled code did.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection would free at another moment in each run
    try:
        return (_peak_of_gpu if device.type == "cuda" else _peak_of_host)(program, subject, device)
    finally:
        if was_enabled:
            gc.enable()


def _peak_of_gpu(program: Program, subject: Subject, device: torch.device) -> int:
    seen: list[int] = []

    def edge() -> None:
        if not seen:
            torch.cuda.reset_peak_memory_stats(device)
        seen.append(torch.cuda.max_memory_allocated(device))

    _run(program, subject, device, edge)
    return seen[-1] - seen[0] if seen else 0


def _peak_of_host(program: Program, subject: Subject, device: torch.device) -> int:
    def edge() -> None:
        with record_function(EDGE):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _run(program, subject, device, edge)
    kineto: Any = profiled.profiler
    events = kineto.kineto_results.events()
    edges = [event.start_ns() for event in events if event.name() == EDGE]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = before = highest = 0
    for moment, change in changes:
        held += change
        if moment < min(edges):
            before = held
        elif moment < max(edges):
            highest = max(highest, held - before)
    return highest


def seconds(program: Program, subject: Subject, device: torch.device) -> tuple[float, Outcome]:
    """How long the program runs, and what it shows: on the host, the time that processors spent on this
    process, which other processes do not change; on a GPU, the time between two events of its stream.
    """
    marks: list[Any] = []

    def edge() -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.process_time())

    outcome = _run(program, subject, device, edge)
    if len(marks) < 2:
        return 0.0, outcome
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return marks[0].elapsed_time(marks[-1]) / 1000, outcome
    return marks[-1] - marks[0], outcome


def _run(program: Program, subject: Subject, device: torch.device, edge: Callable[[], None]) -> Outcome:
    return observe(program.case, program.body, Measured(subject, edge), torch.float32, device)
