"""The corpus "demo": small programs on which stock compilers were seen to differ from eager.

In: nothing. Out: scenarios, each with the public thread that it shows. `gradparity demo` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.scenario import collecting, program_of, scenario
from gradparity.errors import UnknownNameError
from gradparity.probe import Probe

with collecting() as _SCENARIOS:

    @scenario(issue="https://github.com/pytorch/pytorch/issues/144376")
    def hooks_of_a_small_network(p: Probe) -> None:
        """Eager accumulates the last layer's gradients first, and calls its hooks first."""
        net = p.module(
            torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)), "net"
        )
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
        x = p.randn(2, 3)
        with p.backward():
            p.compile(net)(x).sum().backward()

    @scenario(issue="https://github.com/pytorch/pytorch/issues/138553")
    def hooks_of_two_branches(p: Probe) -> None:
        """Eager calls the hook of the branch that was built last first."""
        x = p.leaf("x", p.randn(3, requires_grad=True))
        left, right = x * 2, x * 3
        left.register_hook(p.hook("left"))
        right.register_hook(p.hook("right"))
        loss = (right.sin() + left.exp()).sum()
        with p.backward():
            loss.backward()

    class Straight(torch.autograd.Function):
        """A rounding whose backward hands the gradient through."""

        @staticmethod
        def forward(x: Any) -> Any:
            """Rounds."""
            return x.round()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing to keep."""

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            """As if it had not rounded."""
            return grad

    @scenario(issue="https://github.com/pytorch/pytorch/issues/193279")
    def gradient_of_a_function_by_func_grad(p: Probe) -> None:
        """Eager's torch.func.grad uses the backward that a custom Function defines."""
        x = p.randn(4)
        grad = torch.func.grad(lambda x: (Straight.apply(x) * x).sum())
        p.value("gradient", p.compile(grad)(x))

    @scenario(issue="https://github.com/pytorch/pytorch/issues/131794")
    def gradient_of_an_unused_output(p: Probe) -> None:
        """Eager leaves `.grad` at None for a parameter that only an unused output depends on."""
        a = p.leaf("a", p.randn(3, requires_grad=True))
        b = p.leaf("b", p.randn(3, requires_grad=True))
        used, _ = p.compile(lambda a, b: (a * 2, b * 3))(a, b)
        with p.backward():
            used.sum().backward()

    @scenario(issue="https://github.com/pytorch/pytorch/issues/190758")
    def mask_of_a_dropout_under_a_memory_budget(p: Probe) -> None:
        """Dropout draws its mask once: what is zero in the output is zero in the gradient."""
        import torch._functorch.config as functorch_config

        x = p.leaf("x", p.tensor(torch.ones(64), requires_grad=True))
        with functorch_config.patch(activation_memory_budget=0.1):
            y = p.compile(lambda x: F.dropout(x.sin().cos(), 0.5) * 1.0)(x)
            with p.backward():
                y.sum().backward()
        assert x.grad is not None
        p.same_mask("one mask", y, x.grad)


RUNS = (
    ("hooks_of_two_branches", "stock-ca:eager"),
    ("hooks_of_a_small_network", "compile:aot_eager"),
    ("gradient_of_a_function_by_func_grad", "compile:aot_eager"),
    ("gradient_of_an_unused_output", "compile:aot_eager"),
    ("mask_of_a_dropout_under_a_memory_budget", "compile:aot_eager"),
)
"""Which subject shows what, cheapest ones of stock torch."""


class DemoCorpus:
    """The programs above, one chunk each."""

    name = "demo"

    def chunks(self) -> list[str]:
        """Their names."""
        return list(_SCENARIOS)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The one program of this name."""
        if chunk not in _SCENARIOS:
            raise UnknownNameError("demo program", chunk, list(_SCENARIOS))
        yield program_of(_SCENARIOS[chunk], Case(self.name, chunk, None, seed))
