"""What of torch is otherwise while a training step is traced.

In: the thread that traces. Out: blocks in which the engine, optimizers or a function of torch's are as a
trace needs them, on that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["eager_optimizers", "one_thread", "replaced_by"]


@contextmanager
def replaced_by(module: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """``module.name`` is `call`, which is given what it was before."""
    prior = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(prior, *args, **kwargs)

    setattr(module, name, run)
    try:
        yield
    finally:
        setattr(module, name, prior)


@contextmanager
def one_thread() -> Iterator[None]:
    """The engine runs every node on the calling thread, where the trace is."""
    before = torch._C._is_multithreading_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_multithreading_enabled(before)


@contextmanager
def eager_optimizers(thread: int) -> Iterator[None]:
    """In the step of an optimizer ``is_compiling()`` is false: torch's optimizers compute otherwise when it
    is true, with step counts as tensors of float32 where eager has numbers."""

    def switch(to: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if threading.get_ident() == thread:
                torch.compiler._is_compiling_flag = to

        return hook

    handles = [
        register_optimizer_step_pre_hook(switch(False)),
        register_optimizer_step_post_hook(switch(True)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
