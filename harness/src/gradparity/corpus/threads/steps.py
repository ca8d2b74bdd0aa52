"""Threads about several steps: gradients accumulated, caches that are stale.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe


def _accumulated(p: Probe, zeroed: bool) -> None:
    layers = (torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    net = p.module(torch.nn.Sequential(*layers), "net")
    compiled = p.compile(net)
    for number in range(4):
        y = compiled(p.randn(4, 8))
        with p.backward():
            (y.mean() / 4).backward()
        p.value(f"step {number}", tuple(each.grad for each in net.parameters()))
    if zeroed:
        net.zero_grad(set_to_none=False)
        y = compiled(p.randn(4, 8))
        with p.backward():
            y.sum().backward()


with collecting() as SCENARIOS:

    @scenario(issue="pytorch#169545")
    def t169545(p: Probe) -> None:
        """Eager keeps the gradients of one step while the next one adds to them."""
        _accumulated(p, zeroed=True)

    @scenario(issue="pytorch#96693")
    def t96693(p: Probe) -> None:
        """Eager's gradients of four small batches add up to that of one large batch."""
        _accumulated(p, zeroed=False)

    @scenario(issue="pytorch#194658", tags=("cold",))
    def t194658(p: Probe) -> None:
        """Eager calls the function that a checkpointed part holds now, not one that an earlier part held."""
        x = p.leaf("x", p.randn(4, requires_grad=True))
        for number, inner in enumerate((torch.sin, torch.cos)):
            compiled = p.compile(
                lambda x, inner=inner: checkpoint(lambda t: inner(t) * 2, x, use_reentrant=False)
            )
            y = compiled(x)
            p.value(f"result {number}", y)
            with p.backward():
                y.sum().backward()
