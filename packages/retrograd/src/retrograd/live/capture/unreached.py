"""Eager's error for an input that the roots do not reach, in the words of the installed torch.

In: the position of the input. Out: the exception, raised by torch itself on two tensors of our own.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from retrograd._torch.autograd import EngineRequest, run_stock, window


def raise_as_eager(position: int) -> NoReturn:
    """Raise what ``autograd.grad`` raises when input number `position` is the first unreached one."""
    with torch.enable_grad():
        reached = torch.zeros((), requires_grad=True)
        root = reached.clone()
        unreached = torch.zeros((), requires_grad=True)
    inputs = (*[reached] * position, unreached)
    with window.stock():
        run_stock(EngineRequest((root,), (torch.zeros(()),), False, False, inputs))
    raise AssertionError("torch accepted an unreached input")
