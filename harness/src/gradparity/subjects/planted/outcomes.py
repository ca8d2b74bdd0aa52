"""Faults that show in what was observed, whatever made them: wrong values, metadata, events; and processes that
hang or die.

In: an outcome. Out: another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradparity.outcome import GradRecord, Outcome, TensorRecord
from gradparity.subjects.planted.fault import Fault, Planted

Change = Callable[[TensorRecord], TensorRecord | None]


class Wrong(Planted):
    """A subject with the fault "scale-grad" that does not answer for it, as stock compilers do not."""

    accountable = False

    def __init__(self, name: str) -> None:
        super().__init__(name, change=_first_grad(_scale))


def _first_grad(change: Change) -> Callable[[Outcome], Outcome]:
    def changed(outcome: Outcome) -> Outcome:
        grads = list(outcome.grads)
        for place, grad in enumerate(grads):
            if isinstance(grad.value, TensorRecord):
                grads[place] = GradRecord(grad.name, change(grad.value))
                break
        return replace(outcome, grads=tuple(grads))

    return changed


def _parts(record: TensorRecord, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorRecord:
    return replace(record, parts=tuple(change(part) for part in record.parts))


def _scale(record: TensorRecord) -> TensorRecord:
    return _parts(record, lambda part: part * (1 + 1e-3))


def _last_bit(record: TensorRecord) -> TensorRecord:
    return _parts(record, lambda part: part * (1 + 2e-7))


def _tail(record: TensorRecord) -> TensorRecord:
    """NaN in the elements behind the last full vector of four."""

    def spoilt(part: torch.Tensor) -> torch.Tensor:
        flat = part.clone().reshape(-1)
        flat[flat.numel() // 4 * 4 :] = float("nan")
        return flat.reshape(part.shape)

    return _parts(record, spoilt)


def _beyond_the_block(record: TensorRecord) -> TensorRecord:
    """Zero behind the first sixteen elements of a row."""

    def spoilt(part: torch.Tensor) -> torch.Tensor:
        part = part.clone()
        part[..., 16:] = 0
        return part

    return _parts(record, lambda part: spoilt(part) if part.ndim else part)


def _strides(record: TensorRecord) -> TensorRecord:
    return replace(record, strides=tuple(2 * stride for stride in record.strides or ()))


def _wider(record: TensorRecord) -> TensorRecord:
    return replace(_parts(record, lambda part: part.double()), dtype=torch.float64)


class Rounding(Planted):
    """Promises no bits, so that only what rounding leaves tells; every gradient went through a lower dtype."""

    bitwise = False

    def __init__(self, name: str, wide: torch.dtype, low: torch.dtype) -> None:
        super().__init__(name, change=_each_grad(partial(_parts, change=self._round)))
        self._wide, self._low = wide, low

    def _round(self, part: torch.Tensor) -> torch.Tensor:
        return part.to(self._low).to(part.dtype) if part.dtype is self._wide else part


def _each_grad(change: Change) -> Callable[[Outcome], Outcome]:
    def changed(outcome: Outcome) -> Outcome:
        records = [(grad, grad.value) for grad in outcome.grads]
        return replace(
            outcome,
            grads=tuple(
                GradRecord(grad.name, change(value)) if isinstance(value, TensorRecord) else grad
                for grad, value in records
            ),
        )

    return changed


def _swap(outcome: Outcome) -> Outcome:
    if len(outcome.events) < 2:
        return outcome
    first, second, *rest = outcome.events
    return replace(outcome, events=(second, first, *rest))


def _drop(outcome: Outcome) -> Outcome:
    return replace(outcome, events=outcome.events[:-1])


def _acting(act: Callable[[], None]) -> Callable[[str], Planted]:
    @contextmanager
    def before() -> Iterator[None]:
        act()
        yield

    return lambda name: Planted(name, backward=before)


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


def _in_grad(change: Change) -> Callable[[str], Planted]:
    return lambda name: Planted(name, change=_first_grad(change))


def _in_outcome(change: Callable[[Outcome], Outcome]) -> Callable[[str], Planted]:
    return lambda name: Planted(name, change=change)


GRAD, ANY = ("grad-values-bits",), ("elementwise", "linear")
LOWER = (
    ("float64", "float32"),
    ("float64", "bfloat16"),
    ("float64", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
)
HOOKS: Any = ("hooks", "steps_hooks")

FAULTS = (
    Fault("scale-grad", "a gradient is one part in a thousand too large", _in_grad(_scale), GRAD, ANY),
    Fault("last-bit", "a gradient is off in its last bits", _in_grad(_last_bit), GRAD, ANY),
    Fault("nan-in-the-tail", "a vector's last elements are not written", _in_grad(_tail), GRAD, ANY),
    Fault(
        "beyond-the-block", "a row is cut after sixteen elements", _in_grad(_beyond_the_block), GRAD, ("fusion",)
    ),
    *(
        Fault(
            f"{wide}-through-{low}",
            f"gradients of {wide} are rounded through {low}",
            partial(Rounding, wide=getattr(torch, wide), low=getattr(torch, low)),
            ("grad-values-rounded",),
            ANY,
        )
        for wide, low in LOWER
    ),
    Fault("none-grad", "a gradient is missing", _in_grad(lambda record: None), ("grad-none",), ANY),
    Fault("strides", "a gradient has other strides", _in_grad(_strides), ("grad-strides",), ANY),
    Fault("grad-dtype", "a gradient has another dtype", _in_grad(_wider), ("grad-dtype",), ANY),
    Fault("swap-hooks", "two hooks run in another order", _in_outcome(_swap), ("hook-order", "hook-payload-bits"), HOOKS),
    Fault("drop-event", "the last hook does not run", _in_outcome(_drop), ("hook-count",), HOOKS),
    Fault("raise", "the backward raises", _acting(_raise), ("raises LookupError",), ANY),
    Fault("hang", "the backward hangs", _acting(_hang), ("timeout",)),
    Fault("deaf-hang", "the backward hangs, and no alarm ends it", _acting(_deaf_hang), ("timeout",)),
    Fault("exit", "the process dies", _acting(_exit), ("crash",)),
)  # fmt: skip
