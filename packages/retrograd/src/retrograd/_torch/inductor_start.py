"""Have Inductor ready when it is needed: its modules, Triton's driver, its worker processes.

In: somebody will compile for a GPU before long. Out: a thread loads what takes seconds the first time, while
the forward runs. Whoever compiles waits for it, and so does a fork: a child would find modules half imported.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading

import torch

from retrograd.events import live_log

__all__ = ["await_start", "start_early"]

#: for how many seconds a fork waits.
PATIENCE = 20.0

#: what a first compilation for a GPU imports.
_LOADED = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.triton",
    "torch._inductor.codegen.wrapper",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.runtime.triton_heuristics",
)

_thread: threading.Thread | None = None


@functools.cache
def start_early() -> None:
    """Begin, if there is a GPU and nobody has begun yet. Without a GPU there are no workers to wait for."""
    global _thread
    if torch.cuda.is_available():
        _thread = threading.Thread(target=_start, name="retrograd-inductor-start", daemon=True)
        _thread.start()


def await_start(seconds: float | None = None) -> None:
    """Wait until what has begun is done, for at most so many seconds: an import under way would be met half
    done."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(seconds)


def _start() -> None:
    try:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
        for module in _LOADED:
            importlib.import_module(module)
        from torch.utils._triton import triton_hash_with_backend

        triton_hash_with_backend()
    except Exception:  # it will be met again, by whoever compiles, and then it matters
        live_log.debug("Inductor was not made ready", exc_info=True)


# Not for ever: whoever forks may hold the lock of an import for which the thread waits.
os.register_at_fork(before=functools.partial(await_start, PATIENCE))
