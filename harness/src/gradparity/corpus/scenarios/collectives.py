"""Results that are written late, as those of collectives are: on one rank, with a communication that is none.

In: a probe, whose `compile` is the identity for eager. Out: gradients that are wrong if nobody waits: the
result of `begin` holds zeros until torch's own `wait_tensor` has another object write it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "function")


class Late(distributed.Work):
    """Writes the doubled input into the result, when it is waited for."""

    def __init__(self, result: Tensor, given: Tensor) -> None:
        super().__init__()
        self.result, self.given = result, given

    def wait(self, timeout: Any = None) -> bool:
        self.result.copy_(self.given * 2)
        return True


@torch.library.custom_op("gradparity_scenarios::begin", mutates_args=())
def begin(given: Tensor) -> Tensor:
    """A result that is not there yet."""
    result = torch.zeros_like(given)
    torch._C._distributed_c10d._register_work(result, Late(result, given.clone()))
    return result


@begin.register_fake
def _(given: Tensor) -> Tensor:
    return torch.empty_like(given)


def _wait(result: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return waited


class Doubled(torch.autograd.Function):
    """The sum over two ranks that are alike, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _wait(begin(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _wait(begin(grad))


class Overlapped(torch.autograd.Function):
    """Its backward computes another gradient before it waits, and drops what the wait returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        result = begin(grad @ w.t())
        grad_w = x.t() @ grad
        _wait(result)
        return result, grad_w


@scenario(tags=TAGS)
def results_are_waited_for_in_a_forward(p: Probe) -> None:
    """A forward and a backward wait for their communications, in two calls."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    call = p.compile(lambda a: Doubled.apply(a.sin()).cos())
    for step in range(2):
        out = call(x)
        p.value(f"out {step}", out)
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS)
def results_are_waited_for_behind_other_work(p: Probe) -> None:
    """A backward begins a communication, computes a product, and waits for the result in place."""
    x, w = p.leaf("x", p.randn(2, 3, requires_grad=True)), p.leaf("w", p.randn(3, 3, requires_grad=True))
    call = p.compile(lambda a, b: Overlapped.apply(a.sin(), b).cos())
    for _ in range(2):
        with p.backward():
            call(x, w).sum().backward()


@scenario(tags=("hooks",))
def results_are_waited_for_at_the_end_of_a_backward(p: Probe) -> None:
    """A hook of each leaf begins a communication; a callback at the end waits, and writes the gradients."""
    leaves = [p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "w")]
    begun: list[tuple[Tensor, Tensor]] = []

    def finish() -> None:
        for leaf, result in begun:
            leaf.grad = _wait(result)
        begun.clear()

    def hook(leaf: Tensor) -> None:
        assert leaf.grad is not None
        if not begun:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        begun.append((leaf, begin(leaf.grad)))

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        loss = (leaves[0] * leaves[1]).sin().sum()
        with p.backward():
            loss.backward()
