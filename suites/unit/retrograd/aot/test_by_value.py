"""Gradients whose formula torch chooses by values: the bits are eager's."""

from __future__ import annotations

import pytest
import torch

import retrograd

PRODUCTS = {
    "all": lambda x: x.prod(),
    "the last": lambda x: x.prod(-1).sum(),
    "kept": lambda x: x.prod(0, keepdim=True).sum(),
    "in float64": lambda x: x.prod(dtype=torch.float64),
    "complex": lambda x: torch.complex(x, x + 1).prod(0).abs().sum(),
}


def inputs():
    torch.manual_seed(0)
    for shape in ((3, 4), (1, 4), (5, 1), (2, 0)):
        for zeros in range(3):
            x = torch.randn(shape)
            x.view(-1)[:zeros] = 0
            yield x
    yield torch.randn(4, 3).t()
    yield torch.tensor([[1e25, 1e25, 0.0, 0.0]])


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_product_is_eagers(name):
    fn = PRODUCTS[name]
    fast = retrograd.aot.function(fn, backend="eager", strict=True, recompile_limit=100)
    for value in inputs():
        plain, traced = (value.clone().requires_grad_() for _ in range(2))
        fn(plain).backward()
        fast(traced).backward()
        assert torch.equal(torch.isnan(traced.grad), torch.isnan(plain.grad))
        assert torch.equal(traced.grad.nan_to_num(), plain.grad.nan_to_num())
        assert traced.grad.stride() == plain.grad.stride()


def test_a_product_of_changing_sizes():
    fast = retrograd.aot.function(PRODUCTS["the last"], backend="eager", strict=True, dynamic=True)
    for size in (3, 5, 7):
        plain = torch.arange(2.0 * size).view(2, size).requires_grad_()
        traced = plain.detach().clone().requires_grad_()
        PRODUCTS["the last"](plain).backward()
        fast(traced).backward()
        assert torch.equal(traced.grad, plain.grad)
