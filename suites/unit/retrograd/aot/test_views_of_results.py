"""Returned views of returned views, and results that eager does not copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd import aot

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1),
    "row": lambda x: x[0],
    "column": lambda x: x.unbind(-1)[-1],
    "half": lambda x: x.chunk(2)[1],
    "inserted": lambda x: x.unsqueeze(0),
    "expanded": lambda x: x.expand(2, *x.shape),
    "windows": lambda x: x.unfold(0, 2, 1),
    "all": lambda x: x[:],
    "same": lambda x: x.view_as(x),
}


def seen(fn: Callable[..., Any], size: int, uses: tuple[int, ...]) -> list[Any]:
    """The gradients, and their strides, at the first result and at the argument."""
    torch.manual_seed(0)
    found = []
    x = torch.randn(size, size + 2, requires_grad=True)
    outputs = fn(x)
    if outputs[0].requires_grad:
        outputs[0].register_hook(lambda grad: found.append((grad.tolist(), grad.stride())))
    (x.sin().sum() + sum((outputs[i] * torch.randn(outputs[i].shape)).sum() for i in uses)).backward()
    names = [out.grad_fn.name() for out in outputs[1:] if out.grad_fn]
    return [*found, x.grad.tolist(), x.grad.stride(), names]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("first", VIEWS)
def test_a_returned_view_of_a_returned_view_has_eagers_history(first: str, dynamic: bool) -> None:
    for second in ("transposed", "column", "inserted", "all"):

        def fn(x: Tensor, second: str = second) -> tuple[Tensor, Tensor]:
            view = VIEWS[first](x.sin())
            return view, VIEWS[second](view)

        staged = aot.function(fn, backend="eager", dynamic=dynamic, strict=True)
        for size, uses in itertools.product([4, 6] if dynamic else [4], [(1,), (0, 1)]):
            assert seen(staged, size, uses) == seen(fn, size, uses), second


WAYS = {
    "symbolic": lambda fn: aot.function(fn, backend="eager", dynamic=True),
    "inductor": lambda fn: aot.function(fn, backend="inductor"),
    "compile": lambda fn: retrograd.compile(fn, backend="eager", dynamic=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", [{"p": 0.5, "training": False}, {"p": 0.0}])
def test_a_dropout_that_changes_nothing_returns_its_argument(way: Callable[..., Any], options: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.cos()
        F.dropout(y, **options).mul_(2)
        return F.dropout(x, **options), y * 1

    x = torch.randn(3)
    found = way(fn)(x)
    assert found[0] is x
    torch.testing.assert_close(found[1], x.cos() * 2)


def test_a_dropout_that_drops_everything_draws_nothing() -> None:
    torch.manual_seed(0)
    aot.function(lambda x: F.dropout(x, 1.0), backend="eager", dynamic=True)(torch.randn(3))
    found = torch.rand(2)
    torch.manual_seed(0)
    torch.randn(3)
    assert torch.equal(found, torch.rand(2))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 5, 2),
    "lstm_that_drops": lambda: nn.LSTM(6, 5, 2, dropout=0.5),
    "gru": lambda: nn.GRU(6, 5, bidirectional=True),
}


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
@pytest.mark.parametrize("layer", LAYERS)
def test_recurrent_layers_round_and_draw_as_in_eager_if_sizes_are_symbolic(layer: str) -> None:
    torch.manual_seed(0)
    made = LAYERS[layer]()
    staged = aot.module(made, backend="eager", dynamic=True)
    for size in (4, 6):
        x = torch.randn(2, size, 6)
        found = []
        for call in (made, staged):
            torch.manual_seed(1)
            made.zero_grad()
            call(x)[0].sin().sum().backward()
            found.append([*(p.grad for p in made.parameters()), torch.rand(2)])
        assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_a_margin_loss_rounds_as_in_eager_if_sizes_are_symbolic() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.multi_margin_loss(x, torch.arange(4) % 3)

    torch.manual_seed(0)
    staged = aot.function(fn, backend="eager", dynamic=True)
    for _ in range(10):
        x = torch.randn(4, 7)
        assert torch.equal(staged(x), fn(x))
