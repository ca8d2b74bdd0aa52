"""Functions whose backward launches a Triton kernel of the user's: opaque calls, on the GPU or interpreted.

Without a CUDA device the kernels run in Triton's interpreter, which computes on CPU tensors.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import retrograd

triton = pytest.importorskip("triton", reason="no Triton here: its kernels cannot run, not even interpreted")
tl = pytest.importorskip("triton.language", reason="no Triton here")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


def scale_by_cosine(grad, x, out, n, BLOCK: tl.constexpr):
    """out = grad * cos(x), one block a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(grad + at, mask=inside) * tl.cos(tl.load(x + at, mask=inside))
    tl.store(out + at, value, mask=inside)


@pytest.fixture(scope="module")
def kernel():
    """The kernel, compiled for the GPU or made for the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield triton.jit(scale_by_cosine)


class Sine(torch.autograd.Function):
    """Sine whose backward is a Triton kernel."""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(x)
        ctx.kernel = kernel
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(x)
        ctx.kernel[(triton.cdiv(x.numel(), BLOCK),)](grad, x, out, x.numel(), BLOCK=BLOCK)
        return out, None


def gradient(
    context: contextlib.AbstractContextManager[object], kernel, size: int
) -> tuple[torch.Tensor, list[str]]:
    """The gradient of a program with the Function in its middle, and its hook's calls."""
    torch.manual_seed(0)
    x = torch.randn(size, device=DEVICE, requires_grad=True)
    events: list[str] = []
    y = Sine.apply(x * 2, kernel)
    y.register_hook(lambda grad: events.append(f"{grad.shape}"))
    root = (y.exp() * x).sum()
    with context:
        root.backward()
    assert x.grad is not None
    return x.grad, events


@pytest.mark.parametrize("backend", ["eager", "aten", "inductor"])
def test_as_eager(kernel, backend: str) -> None:
    context = retrograd.compiled_autograd(backend, strict=True)
    for size in (5, 40, 40, 3):
        ours, eager = gradient(context, kernel, size), gradient(contextlib.nullcontext(), kernel, size)
        assert ours[1] == eager[1]
        torch.testing.assert_close(
            ours[0], eager[0], **({"rtol": 0, "atol": 0} if backend == "eager" else {})
        )
    assert context.explain().backwards[0].schedule.opaque_calls
