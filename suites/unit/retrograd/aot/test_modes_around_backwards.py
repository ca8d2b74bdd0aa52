"""Modes that are open around a backward only: they see the backward, and nothing that we trace meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import retrograd

DOORS = {
    "dynamo": lambda module: torch.compile(module, backend="retrograd", options={"backend": "eager"}),
    "aot": lambda module: retrograd.aot.function(module, backend="eager"),
}


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


class Calls(torch.overrides.TorchFunctionMode):
    """Counts calls of torch's functions."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.nn.functional.linear, torch.tanh)
        return func(*args, **(kwargs or {}))


def counted(fn, mode):
    loss = fn(torch.ones(4, 8, requires_grad=True)).tanh().sum()
    with mode:
        loss.backward()
    return mode.get_total_flops() if isinstance(mode, FlopCounterMode) else mode.count


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), Products, Calls])
def test_the_first_backward_is_seen_as_it_is(door, mode):
    torch._dynamo.reset()
    module = nn.Linear(8, 8)
    assert counted(DOORS[door](module), mode()) == counted(module, mode())
