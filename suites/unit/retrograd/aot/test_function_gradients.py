"""What the backward of an `autograd.Function` returns is accepted or refused as in eager."""

from __future__ import annotations

import pytest
import torch

import retrograd
import retrograd.aot

GRADIENTS = {
    "for a number": lambda x, w: (w, x, torch.ones(1)),
    "a text for a number": lambda x, w: (w, x, "text"),
    "a number for a tensor": lambda x, w: (w, 1.0, None),
    "too few": lambda x, w: (w, x),
    "one more": lambda x, w: (w, x, None, torch.ones(1)),
    "one more None": lambda x, w: (w, x, None, None),
    "right": lambda x, w: (w, x, None),
}


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
def test_gradients_that_eager_refuses_are_refused(gradients, is_frozen):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, power):
            ctx.save_for_backward(x, w)
            return x * w**power

        @staticmethod
        def backward(ctx, grad):
            return GRADIENTS[gradients](*ctx.saved_tensors)

    def error_and_grads(fn):
        x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=not is_frozen)
        error = ""
        try:
            fn(x, w).sum().backward()
        except RuntimeError as raised:
            error = str(raised)
        return error, str(x.grad), str(w.grad)

    def fn(x, w):
        return Scale.apply(x, w, 1)

    assert error_and_grads(retrograd.aot.function(fn, backend="eager")) == error_and_grads(fn)
