"""Threads about outputs: views, detached ones, unused ones, the order in which hooks see them.

In: a probe. Out: `SCENARIOS`.
"""

from __future__ import annotations

import torch

from gradparity.corpus.scenario import collecting, scenario
from gradparity.probe import Probe

with collecting() as SCENARIOS:

    @scenario(issue="pytorch#195357")
    def t195357(p: Probe) -> None:
        """Eager returns two views that require grad beside a detached tensor that does not."""
        x = p.leaf("x", p.randn(8, requires_grad=True))

        def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.sin(x)
            return y[0:4], y[4:8], y.detach()

        one, two, detached = p.compile(parts)(x)
        p.value("requires grad", tuple(each.requires_grad for each in (one, two, detached)))
        with p.backward():
            (one.sum() + two.sum()).backward()

    @scenario(issue="pytorch#187346")
    def t187346(p: Probe) -> None:
        """Eager returns a view that was made under no_grad of a tensor that requires grad."""
        x = p.leaf("x", p.randn(3, 3, requires_grad=True))

        def viewed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 3
            with torch.no_grad():
                view = y.view(-1)
            return y.sum(), view

        total, view = p.compile(viewed)(x)
        p.value("view", view)
        with p.backward():
            total.backward()

    @scenario(issue="pytorch#186007")
    def t186007(p: Probe) -> None:
        """Eager accumulates the last layer's gradients first, and calls its hooks first."""
        layers = (torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
        net = p.module(torch.nn.Sequential(*layers), "net")
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(p.hook(name, kind="post_accumulate"))
        y = p.compile(net)(p.randn(2, 3))
        with p.backward():
            y.sum().backward()

    @scenario(issue="pytorch#197896")
    def t197896(p: Probe) -> None:
        """Eager lets a method of a local class append to a list outside."""
        log = p.log

        def logged(x: torch.Tensor) -> torch.Tensor:
            class Helper:
                def go(self) -> None:
                    log.append(1)

            Helper().go()
            return x + 1

        p.value("sum", p.compile(logged)(p.randn(2)))
