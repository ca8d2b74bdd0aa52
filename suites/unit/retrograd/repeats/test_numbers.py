"""Layers that are equal share their code; those that differ in a number do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import retrograd


class Counting:
    """A backend that runs the ATen graph, and counts its compilations."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward


class Layer(nn.Module):
    """Two linear layers in a residual that is scaled by a number (a factor would be a tensor already)."""

    def __init__(self, scale: float, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.after = scale, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.after(self.second(self.first(x).tanh())), alpha=self.scale)


def gradients(
    scales: Sequence[float],
    backend: Any,
    after: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the parameters: compiled, and eager's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(scale, after) for scale in scales]).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    found = []
    for context in (retrograd.compiled_autograd(backend, regions=4), None):
        model.zero_grad()
        loss = model(x).square().sum()
        if context is None:
            loss.backward()
        else:
            with context:
                loss.backward()
        found.append(
            [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        )
    return found[0], found[1]


SCALES = [0.1 * i for i in range(1, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_layers_share_code_and_others_are_one_piece(dtype: torch.dtype) -> None:
    different, same = Counting(), Counting()
    found, wanted = gradients(SCALES, different, dtype=dtype)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    retrograd.reset()  # else these are the same calls with other numbers, which stand apart
    gradients([0.5] * len(SCALES), same, dtype=dtype)
    (whole,), parts = different.graphs, same.graphs
    assert sum(len(part.graph.nodes) for part in parts) * 4 < len(whole.graph.nodes)


def test_a_number_may_decide_what_is_computed() -> None:
    """An exponent decides what the derivative of a power is."""
    torch.manual_seed(0)

    class Power(nn.Module):
        def __init__(self, exponent: float) -> None:
            super().__init__()
            self.first, self.exponent = nn.Linear(8, 8), exponent

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.first(x).sigmoid().tanh().pow(self.exponent).sin().cos()

    model = nn.Sequential(*[Power(exponent) for exponent in (2.0, 3.0, 0.0, 1.0, 2.5, 1.5)])
    x = torch.randn(4, 8)
    model(x).sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = model(x).sum()
    with retrograd.compiled_autograd(Counting(), regions=2):
        loss.backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        assert torch.allclose(parameter.grad, grad, rtol=1e-6, atol=0)
