"""Functions compiled ahead that read what a trace does not know: elements, and what a parameter is.

In: a probe, whose `compile` is the identity for eager. Out: what each call gives, and what its Python did.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "side-effects")


def _calls(p: Probe, fn: Callable[[Tensor], Tensor]) -> None:
    run = p.compile(fn)
    for step in range(2):
        x = p.leaf(f"x{step}", p.randn(3, requires_grad=True))
        with p.backward():
            run(x).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_number_is_read_in_a_try(p: Probe) -> None:
    """The branch that elements choose is taken, although it stands in a ``try``."""

    def fn(x: Tensor) -> Tensor:
        try:
            if x.sum() < 1e9:
                return x * 2
        except Exception:
            p.event("caught", "")
        return x * 13

    _calls(p, fn)


@scenario(tags=TAGS)
def aot_mask_is_an_index_in_a_try(p: Probe) -> None:
    """A mask as an index gives the elements that it chooses, although it stands in a ``try``."""

    def fn(x: Tensor) -> Tensor:
        try:
            return x[x > 0].exp()
        except RuntimeError:
            return x * 13

    _calls(p, fn)


@scenario(tags=TAGS)
def aot_effects_of_a_function_that_reads_a_number(p: Probe) -> None:
    """Each call fills the list once and draws one random number of Python's."""
    log: list[Any] = []
    state = random.getstate()
    random.seed(3)

    def fn(x: Tensor) -> Tensor:
        log.append(len(x))
        factor = random.random()
        h = x * factor
        log.append(h.detach())
        return h * float(h.detach().abs().max())

    _calls(p, fn)
    p.event("kept", len(log))
    p.event("next", random.random())
    p.value("kept", log[1])
    random.setstate(state)


@scenario(tags=TAGS)
def aot_parameter_is_asked_what_it_is(p: Probe) -> None:
    """A parameter has its class, its attributes and its identity inside of the module."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
            self.weight.scale = 4.0
            self.rates = {self.weight: 0.5}

        def forward(self, x: Tensor) -> Tensor:
            y = x * (2 if isinstance(self.weight, nn.Parameter) else 3)
            y = y * getattr(self.weight, "scale", 7.0) * self.rates.get(self.weight, 9.0)
            return y * self.weight

    _calls(p, Scale())


@scenario(tags=TAGS)
def aot_sparse_tensor_made_inside(p: Probe) -> None:
    """Values pass through a sparse tensor that the function makes, and so do their gradients."""
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])

    def fn(x: Tensor) -> Tensor:
        return (torch.sparse_coo_tensor(places, x * x, (2, 3)) * 2).to_dense().sin()

    _calls(p, fn)


@scenario(tags=("compiled", "aot"))
def aot_view_of_a_transposed_argument_beside_two_uses(p: Probe) -> None:
    """The gradient of the transposed argument is one sum of three, in eager's order."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        k = x.transpose(0, 1)
        return k.sin(), k.exp(), k[0]

    x = p.leaf("x", p.randn(4, 5, requires_grad=True))
    out = p.compile(fn)(x)
    with p.backward():
        torch.autograd.backward(out, [p.randn(*one.shape) for one in out])
    p.value("grad", x.grad)
