"""Subject: one way of running a program's backward.

In: a function to compile, or a backward to wrap. Out: contexts and wrappers; counters and notes about what it
did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from gradparity.errors import ReproError
from gradparity.outcome import Outcome

T = TypeVar("T")


class Subject:
    """Runs everything as eager does; the base of all others.

    `bitwise`: promises gradients equal to eager's to the bit. `accountable`: its unexpected divergences
    fail a run; all subjects are accountable but eager and stock torch. `may_refuse`: an error that says
    "not supported" counts as UNSUPPORTED rather than DIVERGE.
    `own_random`: it draws other random numbers than eager. `stock`: the subject with the same forward and
    torch's own backward, where that forward is not eager's. `answers_for_silent`: it answers for what
    `stock` does wrong, too, if nothing raises: values, layouts, side effects. `rounds_as`: stock torch with
    the same code generator: where a value is as near to float64 as stock's, or both are near to eager's,
    the difference is the generator's.
    """

    bitwise: bool = False
    accountable: bool = False
    may_refuse: bool = False
    own_random: bool = False
    stock: Subject | None = None
    answers_for_silent: bool = False
    rounds_as: Subject | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def script(self) -> str:
        """How a user would call it, as Python text: any of the functions `by_subject(target)`,
        `around_backward()` and `around_program()`. Raises ReproError if there is no such way.
        """
        raise ReproError(
            f"subject {self.name} has no form in plain torch\n  try    define Subject.script for it"
        )

    def compile(self, target: T) -> T:
        """Compiles a function or module, or returns it as it is."""
        return target

    def backward(self) -> AbstractContextManager[Any]:
        """The context in which a program runs its backward."""
        return nullcontext()

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """A whole step that is called without its first argument, `backward`."""

        def backward(loss: torch.Tensor) -> None:
            with self.backward():
                loss.backward()

        return partial(step, backward)

    def around(self) -> AbstractContextManager[Any]:
        """A context around the whole program."""
        return nullcontext()

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Protects a recording hook from tracing, where the subject traces hooks."""
        return hook

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

    def reset(self, cold: bool) -> None:
        """Forgets what must not leak from one case into the next; everything, if the case is cold."""
