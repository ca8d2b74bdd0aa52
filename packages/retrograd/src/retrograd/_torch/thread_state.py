"""Modes of the thread, which user code may leave changed and on which compiled code depends.

In: the modes before a call. Out: the same modes after it, the modes as a value to compare, or why no compiled
code may run under them. Eager restores
the thread's state before each node (``ThreadLocalStateGuard`` in ``Engine::thread_main``), so a hook that
leaves grad mode or autocast switched concerns the rest of its own node only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

__all__ = [
    "Modes",
    "UserCode",
    "are_modes_plain",
    "as_if_autocast",
    "modes_of_lowering",
    "switched",
    "thread_state_kept",
    "torch_functions_off",
    "why_interpreted_now",
    "why_modes_differ",
    "without_torch_functions",
]

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = ("cpu", "cuda")

#: grad mode, then autocast per device.
Modes = tuple[bool, ...]


def modes_of_lowering() -> tuple[object, ...]:
    """The modes that tracing or Inductor's code depends on, for a guard."""
    return (
        *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_grad_enabled(),
    )


def why_modes_differ(before: Sequence[object], now: Sequence[object]) -> str:
    """The first mode that differs, with both values."""
    names = (*(f"autocast on {device}" for device in _DEVICES), *_OTHERS)
    name, old, new = next(found for found in zip(names, before, now, strict=True) if found[1] != found[2])
    return f"{name} was {_readable(old)}, now {_readable(new)}"


_OTHERS = ("deterministic algorithms", "deterministic algorithms' warn_only", "grad mode")


def _readable(mode: object) -> str:
    if isinstance(mode, tuple):
        return str(mode[1]) if mode[0] else "off"
    return "on" if mode else "off"


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


@dataclass
class Kept:
    """What was put back after a block: `left` are the modes as the block left them, None if as before."""

    left: Modes | None = None


@contextmanager
def thread_state_kept() -> Iterator[Kept]:
    """Put grad mode and autocast back to what they were at the beginning of the block."""
    before = _modes()
    kept = Kept()
    try:
        yield kept
    finally:
        if (now := _modes()) != before:
            kept.left = now
            _switch(now, before)


@contextmanager
def switched(modes: Modes) -> Iterator[None]:
    """Grad mode and autocast as other code left them."""
    before = _modes()
    _switch(before, modes)
    try:
        yield
    finally:
        _switch(_modes(), before)


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


class UserCode:
    """Calls user code, one call after the other, as inside `thread_state_kept`; cheap where nothing changes.

    Attributes:
        left: the modes as the last call left them, None if as before it.
    """

    __slots__ = ("_before", "_lowering", "left")

    def __init__(self) -> None:
        self._before, self._lowering = _modes(), modes_of_lowering()
        self.left: Modes | None = None

    def call(self, fn: Callable[..., T], args: Sequence[Any]) -> T:
        """What ``fn(*args)`` returns."""
        try:
            return fn(*args)
        finally:
            if (now := _modes()) != self._before:
                self.left = now
                _switch(now, self._before)

    def has_changed_modes(self) -> bool:
        """Whether what runs next may not run as it would have run before the last call."""
        return self.left is not None or modes_of_lowering() != self._lowering or not are_modes_plain()


def are_modes_plain() -> bool:
    """Whether nobody looks at, or takes over, the operations that run now."""
    return (
        forward_ad._current_level < 0
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
    )


#: inside, as in a function made by `without_torch_functions`.
torch_functions_off = torch._C.DisableTorchFunction


def without_torch_functions(fn: Callable[P, T]) -> Callable[P, T]:
    """`fn` with no ``__torch_function__`` of a class or mode called in it: eager's C++ calls none."""

    @functools.wraps(fn)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return fn(*args, **kwargs)

    return quietly


def _modes() -> Modes:
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in _DEVICES))


def _switch(now: Modes, to: Modes) -> None:
    torch.set_grad_enabled(to[0])
    for device, is_on, on in zip(_DEVICES, now[1:], to[1:], strict=True):
        if is_on != on:
            torch.set_autocast_enabled(device, on)
