"""Halves in which layers repeat themselves: compiled once, with the gradients of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import retrograd
from benchmarks.allocator import allocator_peak_of
from retrograd import aot

MEBIBYTE = 1 << 20


class Block(nn.Module):
    """A residual layer with a norm, two products and, perhaps, dropout."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return x + torch.nn.functional.dropout(y, self.dropout)


def blocks(count: int, width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dropout) for _ in range(count)))


def gradients(model: Callable[..., Any], holder: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    torch.manual_seed(5)
    holder.zero_grad()
    y = x.detach().clone().requires_grad_()
    out = model(y)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in holder.parameters()]
    assert y.grad is not None
    assert all(grad is not None for grad in grads)
    return [out.detach(), y.grad, *grads]  # type: ignore[list-item]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()


def counted(run: Callable[[], Any]) -> tuple[int, int]:
    """Parts compiled and parts called for, while `run` runs."""
    names = ("region_compiles", "region_calls")
    before = [retrograd.counters[name] for name in names]
    run()
    compiles, calls = (retrograd.counters[name] - was for name, was in zip(names, before, strict=True))
    return compiles, calls


@pytest.mark.parametrize("partitioner", ["min_cut", "save_all", "recompute_all"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_eagers_bit_for_bit(partitioner: str, dropout: float) -> None:
    eager, x = blocks(5, dropout=dropout), torch.randn(6, 8)
    model = aot.module(copy.deepcopy(eager), backend="aten", partitioner=partitioner, regions=3, strict=True)
    compiles, calls = counted(lambda: assert_same(gradients(model, model, x), gradients(eager, eager, x)))
    assert 0 < compiles < calls


def test_the_number_of_compilations_is_that_of_different_layers() -> None:
    x, seen = torch.randn(6, 8), []
    for count in (6, 12):
        model = aot.module(blocks(count), backend="aten", regions=4, strict=True)
        seen.append(counted(lambda model=model: gradients(model, model, x)))
    assert seen[0][0] == seen[1][0]
    assert seen[1][1] > seen[0][1]


@pytest.mark.parametrize("regions", [False, True])
def test_what_is_small_or_switched_off_is_compiled_whole(regions: bool) -> None:
    model = aot.module(blocks(3), backend="aten", regions=regions, strict=True)
    assert counted(lambda: gradients(model, model, torch.randn(6, 8))) == (0, 0)


def test_a_users_backend_is_given_whole_halves() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return gm

    model = aot.module(blocks(6), backend=backend, regions=3, strict=True)
    gradients(model, model, torch.randn(6, 8))
    assert len(graphs) == 2


def test_regions_must_be_a_switch_or_a_number() -> None:
    with pytest.raises(ValueError, match="option 'regions': got -1"):
        aot.function(torch.sin, regions=-1)


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes(dynamic: bool | None) -> None:
    eager = blocks(5)
    model = aot.module(copy.deepcopy(eager), backend="aten", dynamic=dynamic, regions=4, strict=True)

    def check() -> None:
        for rows in (6, 9, 11):
            x = torch.randn(rows, 8)
            for one, other in zip(gradients(model, model, x), gradients(eager, eager, x), strict=True):
                torch.testing.assert_close(one, other)

    compiles, calls = counted(check)
    assert 0 < compiles < calls


def test_hooks_see_gradients_one_by_one_as_before() -> None:
    seen: dict[bool, list[tuple[str, torch.Tensor]]] = {}
    for regions in (False, True):
        events = seen[regions] = []
        model = aot.module(blocks(5), backend="aten", regions=3 if regions else False, strict=True)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, events=events: events.append((name, p.grad.clone()))
            )
        gradients(model, model, torch.ones(6, 8))
    assert [name for name, _ in seen[True]] == [name for name, _ in seen[False]]
    assert_same([grad for _, grad in seen[True]], [grad for _, grad in seen[False]])


def test_through_dynamo() -> None:
    eager, x = blocks(5), torch.randn(6, 8)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="retrograd", options={"backend": "aten", "regions": 4})
    compiles, calls = counted(lambda: assert_same(gradients(compiled, model, x), gradients(eager, eager, x)))
    assert 0 < compiles < calls


@pytest.mark.parametrize("regions", [False, 3])
@pytest.mark.parametrize("partitioner", ["min_cut", "save_all"])
def test_a_training_step_takes_no_more_memory_than_eagers(partitioner: str, regions: bool | int) -> None:
    """What is computed again is there only as long as it is used; one cotangent is held by torch itself."""

    def step(model: nn.Module) -> int:
        x = torch.randn(4096, 64)
        for _ in range(2):
            model(x).sum().backward()

        def measured(starts: Callable[[], None]) -> None:
            starts()
            model(x).sum().backward()

        return allocator_peak_of(measured)

    eager = step(blocks(6, 64))
    model = aot.module(blocks(6, 64), backend="aten", partitioner=partitioner, regions=regions, strict=True)
    assert eager > 20 * MEBIBYTE
    assert step(model) <= eager * 1.02 + MEBIBYTE


def test_inductor_compiles_a_layer_once() -> None:
    eager, x = blocks(4), torch.randn(6, 8)
    model = aot.module(copy.deepcopy(eager), backend="inductor", regions=4, strict=True)

    def check() -> None:
        for _ in range(2):
            for one, other in zip(gradients(model, model, x), gradients(eager, eager, x), strict=True):
                torch.testing.assert_close(one, other)
                assert one.stride() == other.stride()

    compiles, calls = counted(check)
    # A layer from one residual sum to the next, and what stands beside the layers, forward and backward.
    assert compiles == 4
    assert calls == 7
