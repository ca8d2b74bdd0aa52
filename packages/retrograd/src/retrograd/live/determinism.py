"""Does eager have anything to say about a segment under ``torch.use_deterministic_algorithms``?

In: a function that runs the segment's own operations. Out: its result, or that one of them has no
deterministic form. Such an operation raises or warns in its own kernel; decomposed code would not, so eager
is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["NondeterministicError", "determinism_is_on", "operations_may_warn", "run_deterministically"]

Result = TypeVar("Result")


class NondeterministicError(Exception):
    """An operation has no deterministic form; the text is torch's."""


def determinism_is_on() -> bool:
    """Whether operations without a deterministic form raise or warn."""
    return torch.are_deterministic_algorithms_enabled()


def operations_may_warn() -> bool:
    """Whether such operations warn. Torch hands a warning to Python only inside a backward of its own."""
    return determinism_is_on() and torch.is_deterministic_algorithms_warn_only_enabled()


def run_deterministically(run: Callable[[], Result]) -> Result:
    """What `run` returns.

    Raises:
        NondeterministicError: also where torch is set to warn only.
    """
    try:
        with _errors_not_warnings():
            return run()
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise NondeterministicError(str(error).split(",", 1)[0]) from error


@contextmanager
def _errors_not_warnings() -> Iterator[None]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
