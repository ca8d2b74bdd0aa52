"""Leaves that are not what they were in the forward, or whose class is in Python."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import torch

import retrograd

LENGTHS = {
    "empty": (torch.empty(0), None),
    "one": (torch.empty(1), None),
    "another rank": (torch.empty(2, 3), None),
    "strided": (torch.empty(8)[::2], None),
    "empty, of another dtype": (torch.empty(0, dtype=torch.float64), None),
    "with a gradient": (torch.empty(0), torch.ones(4)),
}


def outcome(context: Any, data: torch.Tensor, before: torch.Tensor | None) -> Any:
    p = torch.nn.Parameter(torch.ones(4))
    loss = (p * 3).sum()
    p.grad = None if before is None else before.clone()
    p.data = data
    try:
        with context:
            loss.backward()
    except RuntimeError as error:
        return p.shape, p.dtype, str(error)
    assert p.data.data_ptr() == data.data_ptr()
    return p.shape, p.dtype, p.grad.tolist(), p.grad.dtype, p.grad.stride()


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("name", LENGTHS)
def test_data_of_another_length_since_the_forward(name: str, backend: str) -> None:
    data, before = LENGTHS[name]
    expected = outcome(contextlib.nullcontext(), data, before)
    for _ in range(3):
        assert outcome(retrograd.compiled_autograd(backend, strict=True), data, before) == expected


class Asked(torch.Tensor):
    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("place", ["", "hook", "post", "grad", "retained"])
def test_a_backward_does_not_call_the_torch_function_of_a_leaf(place: str, backend: str) -> None:
    for _ in range(3):
        p = torch.ones(3).as_subclass(Asked).requires_grad_()
        if place == "hook":
            p.register_hook(lambda grad: None)
        if place == "post":
            p.register_post_accumulate_grad_hook(lambda leaf: None)
        if place == "grad":
            p.grad = torch.ones(3).as_subclass(Asked)
        loss = (p * p * 2).sum().as_subclass(torch.Tensor)
        Asked.calls.clear()
        with retrograd.compiled_autograd(backend, strict=True):
            torch.autograd.backward([loss], retain_graph=place == "retained")
        assert Asked.calls == []


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("before", [None, 1.0])
def test_a_leaf_that_a_backward_names_takes_its_gradient_over(before: float | None, backend: str) -> None:
    def result() -> Any:
        leaf = torch.arange(4.0)[::2][:1].requires_grad_()  # a copy of its gradient has its stride, 2
        leaf.grad = None if before is None else torch.full_like(leaf, before)
        (leaf * 3).backward(torch.ones(1), inputs=[leaf])
        return leaf.grad.tolist(), leaf.grad.stride()

    expected = result()
    for _ in range(3):
        with retrograd.compiled_autograd(backend, strict=True):
            assert result() == expected
