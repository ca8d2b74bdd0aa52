"""The live path on a GPU: bits, events, compiled code and memory as eager has them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import retrograd

pytestmark = pytest.mark.gpu

Context = contextlib.AbstractContextManager[object]


def trained(context: Context, rows: int = 8) -> tuple[list[torch.Tensor], list[str], torch.Tensor]:
    """Gradients, events and input gradient of one step of a small hooked network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()
    events: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    x = torch.randn(rows, 16, device="cuda", requires_grad=True)
    hidden = net[:2](x)
    hidden.register_hook(lambda grad: events.append(f"hidden {grad.device.type}"))
    loss = net[2:](hidden).square().mean() + hidden.mean()
    with context:
        loss.backward()
    torch.cuda.synchronize()
    assert x.grad is not None
    return [p.grad for p in net.parameters()], events, x.grad


def test_the_eager_lowering_is_eager_to_the_bit_on_a_gpu() -> None:
    eager, ours = (
        trained(contextlib.nullcontext()),
        trained(retrograd.compiled_autograd("eager", strict=True)),
    )
    assert all(map(torch.equal, eager[0], ours[0]))
    assert eager[1] == ours[1]
    assert torch.equal(eager[2], ours[2])


def test_inductor_compiles_the_segments_with_triton() -> None:
    context = retrograd.compiled_autograd("inductor", strict=True)
    for rows in (8, 8, 12):
        eager, ours = trained(contextlib.nullcontext(), rows), trained(context, rows)
        torch.testing.assert_close(ours[0], eager[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[2], eager[2], rtol=1e-4, atol=1e-5)
        assert eager[1] == ours[1]
    lowerings = [low for backward in context.explain().backwards for low in backward.lowerings]
    assert {low.how for low in lowerings} == {"inductor"}


def test_a_cpu_and_a_gpu_part_meet() -> None:
    def grads(context: Context) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(6, requires_grad=True)
        scale = torch.randn(6, device="cuda", requires_grad=True)
        loss = ((weight * 2).cuda() * scale).sin().sum().cpu() + weight.cos().sum()
        with context:
            loss.backward()
        assert weight.grad is not None
        assert scale.grad is not None
        return [weight.grad, scale.grad]

    eager = grads(contextlib.nullcontext())
    assert all(map(torch.equal, eager, grads(retrograd.compiled_autograd("eager", strict=True))))
    torch.testing.assert_close(grads(retrograd.compiled_autograd("inductor")), eager)


def test_the_peak_of_a_backward_is_eagers() -> None:
    def peak(context: Context) -> int:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]).cuda()
        x = torch.randn(4096, 256, device="cuda")
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            loss = net(x).square().mean()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with context:
                loss.backward()
            used = torch.cuda.max_memory_allocated() - before
        assert before > 8 * 4096 * 256 * 4
        return before + used

    eager = peak(contextlib.nullcontext())
    for backend in ("eager", "inductor"):
        assert peak(retrograd.compiled_autograd(backend, strict=True)) <= 1.1 * eager
