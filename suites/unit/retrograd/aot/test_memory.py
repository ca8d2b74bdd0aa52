"""What a compiled function holds, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.allocator import allocator_peak_of
from retrograd import aot

Step = Callable[[torch.Tensor], torch.Tensor]
MEBIBYTE = 1 << 20


def compiled(target: nn.Module, partitioner: str) -> nn.Module:
    return aot.module(target, backend="eager", partitioner=partitioner, strict=True)


def peak_of(model: Step, x: torch.Tensor) -> int:
    for _ in range(2):
        model(x).sum().backward()

    def step(starts: Callable[[], None]) -> None:
        starts()
        model(x).sum().backward()

    return allocator_peak_of(step)


@pytest.mark.parametrize("partitioner", ["min_cut", "save_all"])
def test_a_training_step_takes_eagers_memory_and_one_cotangent(partitioner: str) -> None:
    """Four activations of 1 MiB. Torch holds what it gives to a Python node while that runs: one more."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    x = torch.randn(4096, 64)
    eager = peak_of(model, x)
    assert eager > 4 * MEBIBYTE
    assert peak_of(compiled(model, partitioner), x) <= eager + MEBIBYTE + MEBIBYTE // 8


class Masked(nn.Module):
    """Four layers that make the same mask of 1 MiB, and keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.shown = torch.rand(4096, 64) > 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of 4096 x 64."""
        for _ in range(4):
            x = x * torch.where(self.shown, self.bias, -1.0)
            for _ in range(50):
                x = x.neg()
        return x


def test_a_mask_that_each_layer_makes_and_keeps_is_kept_once() -> None:
    model, x = Masked(), torch.randn(4096, 64)
    eager = peak_of(model, x)
    assert peak_of(compiled(model, "save_all"), x) <= eager - 2 * MEBIBYTE


def test_inputs_and_saved_values_go_with_the_graph_although_the_output_stays() -> None:
    fn = aot.function(lambda h: (h.sin() * h).cos(), backend="eager", strict=True)
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    held = weakref.ref(h)
    out = fn(h)
    del h
    assert held() is not None
    out.sum().backward()
    assert held() is None
    assert out.grad_fn is not None


def test_retaining_the_graph_keeps_what_is_needed_to_run_again() -> None:
    fn = aot.function(lambda h: (h.sin() * h).cos(), backend="eager", strict=True)
    x = torch.ones(3, requires_grad=True)
    out = fn(x * 2)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(second.sum(), x)
    y = torch.ones(3, requires_grad=True)
    (want,) = torch.autograd.grad(((y * 2).sin() * (y * 2)).cos().sum(), y, create_graph=True)
    torch.testing.assert_close(third, torch.autograd.grad(want.sum(), y)[0])


def test_a_graph_that_is_given_up_without_a_backward_holds_nothing() -> None:
    fn = aot.function(lambda h: h.sin() * h, backend="eager", strict=True)
    h = torch.ones(3, requires_grad=True) * 2
    held = weakref.ref(h)
    out = fn(h)
    del h, out
    assert held() is None


def test_nothing_of_a_call_without_gradients_stays() -> None:
    fn = aot.function(lambda h: h.sin() * h, backend="eager", strict=True)
    h = torch.ones(3)
    held = weakref.ref(h)
    out = fn(h)
    del h
    assert held() is None
    assert out.grad_fn is None
