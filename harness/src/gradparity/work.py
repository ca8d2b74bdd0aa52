"""work: what a worker does with one unit: one subject over one chunk of a corpus.

In: a Unit whose payload is a `Task` in plain data. Out: rows in plain data, by way of `emit`. Each case has
an alarm.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from gradparity.case import Match
from gradparity.corpus.base import Program
from gradparity.corpus.registry import corpus
from gradparity.differential import compare
from gradparity.errors import CaseTimeout
from gradparity.executors.unit import Emit, Unit
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict, row_of

NOISY = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._subclasses",
    "torch.fx.experimental.symbolic_shapes",
    "transformers",
)


@dataclass(frozen=True)
class Task:
    """One subject over one chunk: at most `limit` cases (None: all) of those that `match` takes."""

    subject: str
    corpus: str
    chunk: str
    device: str
    seed: int
    match: str = "*"
    limit: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a Unit's payload."""
        return asdict(self)


def run_unit(unit: Unit, emit: Emit) -> bool:
    """Runs the unit's task; see `executors.unit.RunUnit`."""
    task = Task(**unit.payload)
    subject = _subject(task.subject)
    quiet()
    for step, program in enumerate(_programs(task)):
        if step < unit.start:
            continue
        case = program.case
        emit("start", step, {"case": case.address, "seed": case.seed})
        row, fit = _row(program, subject, torch.device(task.device), unit.timeout)
        emit("result", step, row.to_json())
        if not fit:
            return False
    return True


def _programs(task: Task) -> Iterator[Program]:
    match, taken = Match(task.match), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = list(corpus(task.corpus).programs(task.chunk, torch.device(task.device), task.seed))
    for program in programs:
        if match.takes(program.case) and (task.limit is None or taken < task.limit):
            taken += 1
            yield program


def _row(program: Program, subject: Subject, device: torch.device, timeout: float) -> tuple[Row, bool]:
    try:
        with alarm(timeout):
            return compare(program, subject, device).row, True
    except CaseTimeout:
        reason = f"longer than {timeout:g} s"
        return row_of(program.case, subject.name, Verdict.TIMEOUT, "timeout", reason), False


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises CaseTimeout inside the block after this time (in the main thread, where there are alarms)."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise CaseTimeout(seconds)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _subject(name: str) -> Subject:
    return resolve(name)


def quiet() -> None:
    """Compilers log every refusal; here a refusal is a result."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
