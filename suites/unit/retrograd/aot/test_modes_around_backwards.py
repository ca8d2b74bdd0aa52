"""Modes that are open around a backward only: they see the backward, and nothing that we trace meanwhile."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

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


class MakesTensors(torch.autograd.Function):
    """Its backward makes tensors whose dtype and device are the defaults."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        factor = 3.0 if torch.empty(()).device.type == "meta" else 2.0
        return grad * factor * torch.tensor([0.1], device="cpu")


@contextmanager
def in_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def on_meta():
    return torch.device("meta")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("around", [in_double, on_meta])
@pytest.mark.parametrize("where", ["call", "backward", "both"])
def test_a_function_makes_tensors_with_the_defaults_of_the_backward(door, around, where):
    torch._dynamo.reset()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def function(x):
        return MakesTensors.apply(x).sin()

    def grad(fn):
        with around() if where != "backward" else nullcontext():
            out = fn(x).sum()
        with around() if where != "call" else nullcontext():
            return torch.autograd.grad(out, x)[0]

    compiled = DOORS[door](function)
    for _ in range(2):
        assert torch.equal(grad(compiled), grad(function))
    if where != "backward":  # another default at the call makes no difference to the next call
        assert torch.equal(*(torch.autograd.grad(fn(x).sum(), x)[0] for fn in (compiled, function)))
