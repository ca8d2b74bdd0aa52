"""observe: runs one program once and gives everything that could be seen.

In: a case, its program, a subject, dtype, device. Out: an Outcome; exceptions of the program are part of it,
errors of the harness itself (GradparityError) are not and pass through.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

import numpy
import torch

from gradparity.case import Case
from gradparity.errors import CaseTimeout, GradparityError
from gradparity.outcome import Outcome, Raised, WarningRecord
from gradparity.probe import Body, Probe, Way


class Observed(Way):
    """A way that says what it did."""

    def around(self) -> AbstractContextManager[Any]:
        """A context around the whole program."""
        return nullcontext()

    def begin(self) -> None:
        """Remembers counters before a run."""

    def compiles(self) -> int:
        """Compiles since `begin`."""
        return 0

    def notes(self) -> tuple[str, ...]:
        """What there is to say about the run since `begin`; "fallback: [code] reason" marks a fallback."""
        return ()

    def observed(self, outcome: Outcome) -> Outcome:
        """A last look at the outcome; only planted faults change it."""
        return outcome


class Printed:
    """Standard output that notes what passes through it. It is shown as before: a debugger needs that."""

    def __init__(self, through: Any) -> None:
        self._through, self.text = through, ""

    def write(self, text: str) -> int:
        """Notes the text and hands it on."""
        self.text += text
        return int(self._through.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._through, name)


def observe(case: Case, body: Body, subject: Observed, dtype: torch.dtype, device: torch.device) -> Outcome:
    """Runs the program under the subject with the case's seed and records the outcome."""
    probe = Probe(case, subject, dtype, device)
    raised: Raised | None = None
    subject.begin()
    torch.manual_seed(case.seed)
    random_before, printed = random_state(device), Printed(sys.stdout)
    with numbers_of_python(case.seed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        try:
            with redirect_stdout(printed), subject.around():
                body(probe)
        except (GradparityError, CaseTimeout, KeyboardInterrupt):
            raise
        except BaseException as error:
            raised = Raised.of(error)
            error.__traceback__ = None
        seconds = time.perf_counter() - started
        grads, state = probe.grads(), probe.state()
    random_after = random_state(device)
    theirs, ours = _split(caught)
    outcome = Outcome(
        grads=grads,
        values=tuple(probe.values),
        events=tuple(probe.events),
        state=state,
        log=(*probe.logged(), *printed.text.splitlines()),
        invariants=tuple(probe.invariants),
        random=random_after,
        drew=random_after != random_before,
        raised=raised,
        warnings=theirs,
        notes=subject.notes() + ours,
        compiles=subject.compiles(),
        seconds=seconds,
    )
    probe.release()
    return subject.observed(outcome)


@contextmanager
def numbers_of_python(seed: int) -> Iterator[None]:
    """The generators of Python and NumPy begin with this seed inside, and go on as before afterwards."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def random_state(device: torch.device) -> str:
    """A fingerprint of torch's random number generators: the CPU's, and the GPU's for programs on one."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return hashlib.blake2b(b"".join(s.numpy().tobytes() for s in states), digest_size=6).hexdigest()


def _split(caught: list[warnings.WarningMessage]) -> tuple[tuple[WarningRecord, ...], tuple[str, ...]]:
    theirs: list[WarningRecord] = []
    ours: list[str] = []
    for item in caught:
        if item.category.__module__.split(".")[0] == "retrograd":
            ours.append(
                f"{item.category.__name__}: {str(item.message).splitlines()[0] if str(item.message) else ''}"
            )
        else:
            theirs.append(WarningRecord(item.category.__name__, str(item.message)))
    return tuple(theirs), tuple(ours)
