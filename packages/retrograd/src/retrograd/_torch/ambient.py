"""The modes around a call that change what operations do: grad mode and autocast.

In: nothing. Out: `Ambient`, comparable, which can be put back for a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambient", "autocast_off", "is_foreign_mode_active", "is_traced_now"]

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


def is_traced_now() -> bool:
    """Whether a trace into a graph is going on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_foreign_mode_active() -> bool:
    """Whether somebody watches or transforms operations: a dispatch mode, or a functorch transform."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack())
