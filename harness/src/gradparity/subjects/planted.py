"""Planted faults: eager with one thing wrong, which the harness must find.

In: a fault's name. Out: a subject that is accountable and promises bitwise equality, and breaks its word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gradparity.outcome import GradRecord, Outcome, TensorRecord
from gradparity.subjects.base import Subject

Change = Callable[[Outcome], Outcome]


class Planted(Subject):
    """Eager whose outcome is changed after the run, or whose backward misbehaves."""

    bitwise = True
    accountable = True

    def __init__(
        self, name: str, change: Change | None = None, act: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name)
        self._change, self._act = change, act

    @contextmanager
    def backward(self) -> Iterator[Any]:
        """Misbehaves before the backward runs, if that is the fault."""
        if self._act is not None:
            self._act()
        yield

    def observed(self, outcome: Outcome) -> Outcome:
        """Changes the outcome, if that is the fault."""
        return self._change(outcome) if self._change is not None else outcome


class Wrong(Planted):
    """A subject with the fault "scale-grad" that does not answer for it, as stock compilers do not."""

    accountable = False

    def __init__(self, name: str) -> None:
        super().__init__(name, change=_scale)


def planted(name: str, fault: str) -> Subject:
    """The subject with this fault."""
    found = FAULTS[fault]
    return Planted(name, act=found) if fault in ACTS else Planted(name, change=found)


def _first_grad(outcome: Outcome, change: Callable[[TensorRecord], TensorRecord | None]) -> Outcome:
    grads = list(outcome.grads)
    for place, grad in enumerate(grads):
        if isinstance(grad.value, TensorRecord):
            grads[place] = GradRecord(grad.name, change(grad.value))
            break
    return replace(outcome, grads=tuple(grads))


def _scale(outcome: Outcome) -> Outcome:
    return _first_grad(outcome, lambda g: replace(g, parts=tuple(part * (1 + 1e-3) for part in g.parts)))


def _last_bit(outcome: Outcome) -> Outcome:
    return _first_grad(outcome, lambda g: replace(g, parts=tuple(part * (1 + 2e-7) for part in g.parts)))


def _none(outcome: Outcome) -> Outcome:
    return _first_grad(outcome, lambda g: None)


def _strides(outcome: Outcome) -> Outcome:
    return _first_grad(outcome, lambda g: replace(g, strides=tuple(2 * s for s in g.strides or ())))


def _swap(outcome: Outcome) -> Outcome:
    if len(outcome.events) < 2:
        return outcome
    first, second, *rest = outcome.events
    return replace(outcome, events=(second, first, *rest))


def _drop(outcome: Outcome) -> Outcome:
    return replace(outcome, events=outcome.events[:-1])


def _raise() -> None:
    raise LookupError("planted")


def _hang() -> None:
    while True:
        time.sleep(0.05)


def _deaf_hang() -> None:
    import signal

    signal.setitimer(signal.ITIMER_REAL, 0)
    _hang()


def _exit() -> None:
    os._exit(7)


ACTS: dict[str, Callable[[], None]] = {"raise": _raise, "hang": _hang, "deaf-hang": _deaf_hang, "exit": _exit}
"""Faults of behaviour. "deaf-hang" cannot be interrupted from inside, like a loop in C++."""

FAULTS: dict[str, Any] = {
    "scale-grad": _scale,
    "last-bit": _last_bit,
    "none-grad": _none,
    "strides": _strides,
    "swap-hooks": _swap,
    "drop-event": _drop,
    **ACTS,
}
