"""Whether an ``autograd.Function`` wants zeros for undefined gradients.

In: a Function's context. Out: its flag ``materialize_grads``. torch lets the flag be set (through
``set_materialize_grads``, whoever calls it) but not be read. So it is read where torch keeps it: in the
context's own memory, at the one byte that changes when the flag of a context of ours is switched.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def materializes_grads(ctx: Any) -> bool:
    """Whether undefined gradients reach the backward of `ctx` as zeros."""
    return ctypes.string_at(id(ctx) + flag_offset(), 1) != b"\0"


@functools.cache
def flag_offset() -> int:
    """Where in a context the flag is.

    Raises:
        LookupError: switching the flag does not change exactly one byte.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        ctx: Any = _Sample.apply(torch.zeros((), device="cpu", requires_grad=True)).grad_fn
    images = []
    for flag in (True, False, True, False):
        ctx.materialize_grads = flag
        images.append(ctypes.string_at(id(ctx), torch._C._FunctionBase.__basicsize__))
    on, off, *again = images
    changed = [i for i, (one, other) in enumerate(zip(on, off, strict=True)) if one != other]
    if len(changed) != 1 or again != [on, off] or (on[changed[0]], off[changed[0]]) != (1, 0):
        raise LookupError(f"torch {torch.__version__} keeps materialize_grads in a way that is not known")
    return changed[0]
