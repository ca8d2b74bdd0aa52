"""Modes of the thread, which user code may leave changed and on which compiled code depends.

In: the modes before a call. Out: the same modes after it, or the modes as a value to compare. Eager restores
the thread's state before each node (``ThreadLocalStateGuard`` in ``Engine::thread_main``), so a hook that
leaves grad mode or autocast switched concerns its own node only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

__all__ = ["modes_of_lowering", "thread_state_kept", "without_torch_functions"]

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = ("cpu", "cuda")


def modes_of_lowering() -> tuple[object, ...]:
    """The modes that tracing or Inductor's code depends on, for a guard."""
    return (
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES),
        torch.are_deterministic_algorithms_enabled(),
    )


@contextmanager
def thread_state_kept() -> Iterator[None]:
    """Put grad mode and autocast back to what they were at the beginning of the block."""
    grad_mode = torch.is_grad_enabled()
    autocast = [torch.is_autocast_enabled(device) for device in _DEVICES]
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_mode)
        for device, enabled in zip(_DEVICES, autocast, strict=True):
            if torch.is_autocast_enabled(device) != enabled:
                torch.set_autocast_enabled(device, enabled)


def without_torch_functions(fn: Callable[P, T]) -> Callable[P, T]:
    """`fn` with no ``__torch_function__`` of a class or mode called in it: eager's C++ calls none."""

    @functools.wraps(fn)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return fn(*args, **kwargs)

    return quietly
