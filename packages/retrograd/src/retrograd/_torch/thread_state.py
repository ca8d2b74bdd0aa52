"""Modes of the thread, which user code may leave changed and on which compiled code depends.

In: the modes before a call. Out: the same modes after it, or the modes as a value to compare. Eager restores
the thread's state before each node (``ThreadLocalStateGuard`` in ``Engine::thread_main``), so a hook that
leaves grad mode or autocast switched concerns its own node only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["as_if_autocast", "modes_of_lowering", "thread_state_kept"]

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


def as_if_autocast(dtype: torch.dtype | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `fn`, an operation of a traced backward, under the autocast that is on, as eager would.

    Eager brings a gradient back to the dtype of its forward value after each node; in a traced graph that has
    no such checks any more, `dtype` says what the result was. Where it is not known, autocast is left out.
    """
    if not torch._C._is_any_autocast_enabled():
        return fn(*args, **kwargs)
    if dtype is None:
        with torch._C._DisableAutocast():
            return fn(*args, **kwargs)
    result = fn(*args, **kwargs)
    return result.to(dtype) if result.dtype != dtype else result
