"""Leaves that ask for gradients of another dtype than their own, in code compiled ahead of time."""

from __future__ import annotations

import pytest
import torch

import retrograd


class Wide(torch.autograd.Function):
    """A product of low precision, with the gradient of the weight in float32."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.float().t() @ grad.float()


FUNCTIONS = {
    "a Function": lambda x, w: Wide.apply(x, w).float().pow(2).sum(),
    "a Function twice": lambda x, w: Wide.apply(Wide.apply(x, w), w).float().pow(2).sum(),
    "a weight twice": lambda x, w: ((x @ w) @ w).float().pow(2).sum(),
}
DOORS = {
    "dynamo": lambda fn, **more: torch.compile(fn, backend="retrograd", options={"backend": "eager", **more}),
    "aot": lambda fn, **more: retrograd.aot.function(fn, backend="eager", **more),
}


def trained(fn, dtypes):
    torch.manual_seed(0)
    w = torch.randn(4, 4).bfloat16().requires_grad_()
    found = []
    for dtype in dtypes:
        w.grad, w.grad_dtype = None, dtype
        fn(torch.randn(2, 4).bfloat16(), w).backward()
        found.append((w.grad.dtype, w.grad.tolist()))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (None,) * 2, (torch.bfloat16, torch.float32, None)])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_is_not_rounded_before_it_arrives(name, door, dtypes):
    torch._dynamo.reset()
    fn = FUNCTIONS[name]
    assert trained(DOORS[door](fn), dtypes) == trained(fn, dtypes)


@pytest.mark.parametrize("door", DOORS)
def test_one_gradient_of_the_own_dtype_is_compiled(door):
    torch._dynamo.reset()

    def fn(x, w):
        return (x @ w).float().pow(2).sum()

    fast = DOORS[door](fn, strict=True)
    assert trained(fast, (torch.float32,) * 2) == trained(fn, (torch.float32,) * 2)


def test_the_report_says_so():
    fast = DOORS["aot"](FUNCTIONS["a Function"], strict=True)
    with pytest.raises(retrograd.CaptureError, match="grad_dtype"):
        trained(fast, (torch.float32,))
