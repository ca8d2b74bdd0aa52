"""A compiled function runs the kernels that are chosen when it is called, as eager does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import retrograd
import retrograd.aot
import retrograd.dynamo
from retrograd.runtime.modes import ThreadModes

Around = Callable[[], AbstractContextManager[Any]]


def by_dynamo(fn: Any) -> Any:
    return torch.compile(fn, backend="retrograd", options={"backend": "eager"})


def staged(fn: Any) -> Any:
    return retrograd.aot.function(fn, backend="eager")


def step(fn: Any) -> Any:
    return retrograd.compile_step(fn, backend="eager")


def attention(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q.sin(), q.cos())


def math_kernel() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("door", [by_dynamo, staged, step])
@pytest.mark.parametrize("around", [(nullcontext, math_kernel), (math_kernel, nullcontext)])
def test_attention_runs_the_kernel_of_each_call(door: Any, around: tuple[Around, Around]) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 1, 5, 8, requires_grad=True)
    call = door(attention)
    for block in around * 3:
        with block():
            got, want = call(q), attention(q)
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (got, want)))


def in_part_by_math(q: Tensor) -> Tensor:
    with math_kernel():
        out = attention(q)
    return out + attention(q)


@pytest.mark.parametrize("door", [by_dynamo, staged, step])
def test_a_choice_inside_a_function_ends_with_its_block(door: Any) -> None:
    torch._dynamo.reset()
    call, q, before = door(in_part_by_math), torch.ones(2, 1, 5, 8), ThreadModes.now()
    for block in (math_kernel, nullcontext, without_mkldnn) * 2:
        with block():
            inside = ThreadModes.now()
            got = call(q)
            assert ThreadModes.now() == inside
            assert torch.equal(got, in_part_by_math(q))
    assert ThreadModes.now() == before


@pytest.mark.parametrize("door", [by_dynamo, staged])
def test_a_second_derivative_uses_the_kernel_of_the_call(door: Any) -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    found = []
    for fn in (door(attention), attention):
        with math_kernel():
            out = fn(q)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), q)[0])
    assert torch.equal(*found)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_recurrent_layer_runs_with_and_without_mkldnn() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 5, batch_first=True), torch.ones(2, 3, 4)
    call = staged(lambda x: layer(x)[0])
    for block in (nullcontext, without_mkldnn, nullcontext):
        with block():
            assert torch.equal(call(x), layer(x)[0])


def test_choices_are_restored() -> None:
    with math_kernel(), without_mkldnn():
        chosen = ThreadModes.now()
    before = ThreadModes.now()
    assert chosen != before
    with chosen.restored():
        assert ThreadModes.now() == chosen
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert ThreadModes.now() == before
