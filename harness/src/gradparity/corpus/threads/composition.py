"""Threads about features together: random numbers, checkpoint, autocast, attention, low precision.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe

with collecting() as SCENARIOS:

    @scenario(issue="pytorch#198333")
    def t198333(p: Probe) -> None:
        """Eager's checkpoint differentiates the mask that the forward drew, after a transpose."""
        x = p.leaf("x", p.tensor(torch.ones(2, 16, 64), requires_grad=True))

        def dropped(x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x.transpose(1, 2).contiguous(), 0.5)

        y = p.compile(lambda x: checkpoint(dropped, x, use_reentrant=False))(x)
        with p.backward():
            y.sum().backward()
        assert x.grad is not None
        p.same_mask("mask", y.detach().transpose(1, 2), x.grad)

    @scenario(issue="pytorch#190758")
    def t190758(p: Probe) -> None:
        """Eager's dropout draws its mask once: what is zero in the output is zero in the gradient."""
        x = p.leaf("x", p.tensor(torch.ones(64), requires_grad=True))
        with functorch_config.patch(activation_memory_budget=0.1):
            y = p.compile(lambda x: F.dropout(x.sin().cos(), 0.5) * 1.0)(x)
            with p.backward():
                y.sum().backward()
        assert x.grad is not None
        p.same_mask("mask", y.detach(), x.grad)

    @scenario(issue="pytorch#179804")
    def t179804(p: Probe) -> None:
        """Eager computes in full precision where autocast is switched off inside, in the backward too."""
        w = p.leaf("w", p.randn(8, 8, requires_grad=True))
        h = p.cast(p.randn(4, 8).to(torch.bfloat16))

        def inner(h: torch.Tensor) -> torch.Tensor:
            with torch.autocast(h.device.type, enabled=False):
                return h.to(w.dtype) @ w.t()

        with torch.autocast(p.device.type, dtype=torch.bfloat16):
            y = p.compile(inner)(h)
        with p.backward():
            y.sum().backward()

    @scenario(issue="pytorch#162228")
    def t162228(p: Probe) -> None:
        """Eager gives a bias that a score function of FlexAttention reads its gradient, where it has one."""
        on_gpu = p.device.type == "cuda"
        q, k, v = (p.leaf(name, p.randn(1, 2, 16, 8, requires_grad=on_gpu)) for name in "qkv")
        bias = p.leaf("bias", p.randn(2, requires_grad=on_gpu))

        def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j))

        y = p.compile(attended)(q, k, v, bias)
        p.value("attended", y)
        with p.backward():
            (y.sum().backward() if on_gpu else None)

    @scenario(issue="pytorch#146377")
    def t146377(p: Probe) -> None:
        """Eager's FlexAttention reads keys of another length and with gaps right, at a second call too."""
        on_gpu = p.device.type == "cuda"
        q, k, v = (p.leaf(name, p.randn(1, 2, 48, 16, requires_grad=on_gpu)) for name in "qkv")
        compiled = p.compile(lambda q, k, v: flex_attention(q, k, v))
        p.value("whole", compiled(q, k, v))
        y = compiled(q, k[:, :, :-16], v[:, :, :-16])
        p.value("cut", y)
        with p.backward():
            (y.sum().backward() if on_gpu else None)

    @scenario(issue="pytorch#168126")
    def t168126(p: Probe) -> None:
        """Eager rounds to bfloat16 between operators; a compiler may keep more, and is no farther from the
        truth.
        """
        x = p.leaf("x", p.cast(p.randn(16, 32).to(torch.bfloat16)).requires_grad_())
        w = p.leaf("w", p.cast(p.randn(32, 32).to(torch.bfloat16)).requires_grad_())
        y = p.compile(lambda x, w: F.gelu(F.silu(x @ w) * x).softmax(-1))(x, w)
        with p.backward():
            y.float().pow(2).sum().backward()
