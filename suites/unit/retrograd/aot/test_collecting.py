"""A process group that collects what is started: no trace begins that, so no error of it leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import retrograd
from retrograd.errors import Refusal
from retrograd.facts import patches
from retrograd.graph.operator_effects import around_collecting, asynchronous_refused

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def begun(group, monkeypatch) -> list[str]:
    """What really began or ended to collect, in order. The group itself only notes it."""
    seen: list[str] = []
    with around_collecting(lambda original, *args: None):
        pass  # from here on torch's method is a dispatcher
    owner, name = patches.owner_and_attribute(patches.COLLECTING)
    dispatcher = patches._dispatcher(patches.COLLECTING, lambda *args: seen.append("begin"))
    monkeypatch.setattr(owner, name, dispatcher)
    return seen


class Collecting(torch.autograd.Function):
    """Begins to collect, reads the tensor's sum, and ends."""

    seen: list[str]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.group.WORLD._start_coalescing(CPU)
        total = x.sum().item()
        Collecting.seen.append("end")
        return x * total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class CollectingLater(torch.autograd.Function):
    """The same in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Collecting.forward(ctx, grad)


@pytest.mark.parametrize("way", ["function", "compile"])
def test_what_begins_to_collect_in_the_trace_of_a_backward_ends(begun, way) -> None:
    Collecting.seen = begun
    make = retrograd.compile if way == "compile" else retrograd.aot.function
    x = torch.ones(3, requires_grad=True)
    make(lambda x: CollectingLater.apply(x) * 2, backend="eager")(x).sum().backward()
    assert begun == ["begin", "end"]
    assert torch.equal(x.grad, torch.full((3,), 12.0))


@pytest.mark.parametrize("way", ["function", "plain", "compile"])
def test_what_begins_to_collect_in_a_trace_ends(begun, way) -> None:
    Collecting.seen = begun

    def plain(x: torch.Tensor) -> torch.Tensor:
        dist.group.WORLD._start_coalescing(CPU)
        total = x.sum().item()
        begun.append("end")
        return x * total

    fn = plain if way == "plain" else Collecting.apply
    run = (
        retrograd.compile(lambda x: fn(x) * 2, backend="eager")
        if way == "compile"
        else retrograd.aot.function(lambda x: fn(x) * 2, backend="eager")
    )
    x = torch.ones(3, requires_grad=True)
    run(x).sum().backward()
    assert begun == ["begin", "end"]
    assert torch.equal(x.grad, torch.full((3,), 2.0 if way != "plain" else 6.0))


def test_a_probe_on_fakes_does_not_begin_to_collect(begun) -> None:
    with asynchronous_refused(), pytest.raises(Refusal, match="collects"):
        dist.group.WORLD._start_coalescing(CPU)
    assert begun == []
