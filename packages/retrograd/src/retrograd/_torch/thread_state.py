"""Modes of the thread, which user code may leave changed and on which compiled code depends.

In: the modes before a call. Out: the same modes after it, the modes as a value to compare, or why no compiled
code may run under them. Eager restores
the thread's state before each node (``ThreadLocalStateGuard`` in ``Engine::thread_main``), so a hook that
leaves grad mode or autocast switched concerns its own node only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["modes_of_lowering", "thread_state_kept", "why_interpreted_now"]

_DEVICES = ("cpu", "cuda")


def modes_of_lowering() -> tuple[object, ...]:
    """The modes that tracing or Inductor's code depends on, for a guard."""
    return (
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


def why_interpreted_now(args: Sequence[Any]) -> str | None:
    """Which mode of the moment compiled code would escape; None if none does."""
    if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
        return "forward-mode AD: an argument has a tangent"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a functorch transform is active"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is active"
    if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved-tensor hooks are active in grad mode"
    return None


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


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
