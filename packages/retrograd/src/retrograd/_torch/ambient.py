"""The modes around a call that change what operations do: grad mode and autocast.

In: nothing. Out: `Ambient`, comparable, which can be put back for a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Ambient", "autocast_off", "is_foreign_mode_active", "modes_now", "undifferentiated"]

_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Ambient:
    """Grad mode and autocast as they are at one time.

    Attributes:
        grad: whether autograd records.
        autocast: device type and dtype of each autocast that is on.
        caches: whether autocast keeps casts of parameters.
    """

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    caches: bool = True

    @staticmethod
    def now() -> Ambient:
        """The modes of this thread."""
        grad = torch.is_grad_enabled()
        autocast = Ambient.autocast_now()
        return Ambient(grad, autocast, torch.is_autocast_cache_enabled()) if autocast else _PLAIN[grad]

    @staticmethod
    def autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
        """The autocasts of this thread that are on."""
        if not torch._C._is_any_autocast_enabled():
            return ()
        return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """These modes, whatever they are outside."""
        with ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self.grad))
            modes.enter_context(autocast_off())
            for device, dtype in self.autocast:
                modes.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self.caches))
            yield


_PLAIN = {grad: Ambient(grad) for grad in (False, True)}


@contextmanager
def autocast_off() -> Iterator[None]:
    """No autocast inside."""
    with ExitStack() as modes:
        for device, _ in Ambient.autocast_now():
            modes.enter_context(torch.autocast(device, enabled=False))
        yield


_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def is_foreign_mode_active() -> bool:
    """Whether somebody watches or transforms operations: a dispatch mode, or a functorch transform."""
    return bool(_dispatch_modes() or _transforms())


def modes_now() -> bool | Ambient:
    """`Ambient.now`, or just its grad mode if that is all: a key that is quick to make and to compare."""
    return Ambient.now() if torch._C._is_any_autocast_enabled() else torch.is_grad_enabled()


def undifferentiated(code: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`code`, run below autograd (which then records nothing, while operators that ask for grad mode see the
    caller's) and without autocast, whatever is on outside."""
    below, is_autocast_on = torch._C._AutoDispatchBelowAutograd, torch._C._is_any_autocast_enabled

    def run(args: list[Any]) -> Any:
        with below():
            if is_autocast_on():
                with autocast_off():
                    return code(args)
            return code(args)

    return run
