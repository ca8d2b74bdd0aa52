"""Plain: what stands in for a subject while a program is drawn, or run in eager to see whether it is sound.

In: nothing. Out: `PLAIN`, which compiles nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from gradparity.outcome import Outcome

T = TypeVar("T")


class Plain:
    """Eager, as far as `observe` asks."""

    def compile(self, target: T) -> T:
        """The target itself."""
        return target

    def backward(self) -> AbstractContextManager[Any]:
        """No context."""
        return nullcontext()

    def training_step(self, step: Callable[..., T]) -> Callable[..., T]:
        """The step with torch's own backward."""
        return partial(step, torch.Tensor.backward)

    def around(self) -> AbstractContextManager[Any]:
        """No context."""
        return nullcontext()

    def wrap_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook itself."""
        return hook

    def begin(self) -> None:
        """Nothing to remember."""

    def compiles(self) -> int:
        """None."""
        return 0

    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def observed(self, outcome: Outcome) -> Outcome:
        """The outcome itself."""
        return outcome


PLAIN = Plain()
