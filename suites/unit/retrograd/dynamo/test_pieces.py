"""Pieces of a function between breaks: those of one kernel run as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import retrograd
from retrograd.report import Report

broken = torch._dynamo.graph_break


def pieces_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[int, int]:
    """How many graphs ran as they are, and how many were compiled. Values and gradients are eager's."""
    compiled = retrograd.compile(function, backend="eager", dynamic=False)
    for _ in range(2):
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = compiled(mine), function(eagers)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(mine.grad, eagers.grad)  # type: ignore[arg-type]
    report: Report = retrograd.explain()
    names = [graph.name for graph in report.graphs]
    as_they_are = names.count("a piece that runs as it is")
    return as_they_are, len(names) - as_they_are


def test_one_kernel_and_its_views_run_as_they_are() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.t()  # no kernel
        broken()
        y = y.unsqueeze(0).sin()[0]  # one
        broken()
        return (y * 2).relu()  # two

    assert pieces_of(function, torch.randn(3, 4)) == (2, 1)


def test_a_function_that_nothing_breaks_is_compiled() -> None:
    assert pieces_of(lambda x: x.sin(), torch.randn(3)) == (0, 1)


def test_a_call_of_several_kernels_is_compiled() -> None:
    labels = torch.tensor([0, 1, 0])

    def function(x: torch.Tensor) -> torch.Tensor:
        broken()
        return torch.nn.functional.cross_entropy(x, labels)

    assert pieces_of(function, torch.randn(3, 4)) == (0, 1)


def test_what_changes_a_tensor_is_compiled() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        broken()
        y.sin_()
        broken()
        return y.view(-1)

    assert pieces_of(function, torch.randn(3, 4)) == (2, 1)


def test_a_function_of_the_users_is_not_called_to_count_it() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def function(x: torch.Tensor) -> torch.Tensor:
        broken()
        return Doubled.apply(x)  # type: ignore[no-any-return]

    assert pieces_of(function, torch.randn(3)) == (0, 1)


def test_a_piece_whose_sizes_depend_on_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        places = (x > 0).nonzero()
        broken()
        return x[places[:, 0]].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = retrograd.compile(function, backend="eager")
        for _ in range(2):
            x = torch.randn(5)
            assert torch.equal(compiled(x), function(x))

    def first(x: torch.Tensor) -> torch.Tensor:
        broken()
        return x.nonzero()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.tensor([1.0, 0.0, 2.0])
        assert torch.equal(retrograd.compile(first, backend="eager")(x), first(x))


def test_a_piece_is_asked_nothing_of_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        broken()
        return (y * 2).relu()

    compiled = retrograd.compile(function, backend="eager", dynamic=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 2)
        assert torch.equal(compiled(x), function(x))
    assert len(retrograd.explain().graphs) == 2


@pytest.mark.parametrize("kept", ["a graph", "nothing"])
def test_history_and_hooks_are_eagers(kept: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.t()
        broken()
        y.register_hook(lambda grad: grad * 3)
        return (y * 2).relu()

    seen = []
    for run in (function, retrograd.compile(function, backend="eager")):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=kept == "a graph")
        seen.append(grad)
    assert torch.equal(*seen)
