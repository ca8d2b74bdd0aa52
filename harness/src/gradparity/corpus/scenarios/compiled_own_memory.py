"""Results that equal an input, of a compiled function: sums with zeros, products with ones.

In: a probe, whose `compile` is the identity for eager. Out: values and gradients after one of two equal
tensors was changed. In eager each is memory of its own; a compiler may leave out what changes no element. One
scenario for each way of computing nothing, and each way of noticing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aliasing")
Same = Callable[[Tensor], Tensor]

SAME: dict[str, Same] = {
    "times_ones": lambda x: x * torch.ones_like(x),
    "ones_times": lambda x: torch.ones(6, device=x.device, dtype=x.dtype) * x,
    "over_ones": lambda x: x / torch.ones_like(x),
    "plus_zeros": lambda x: x + torch.zeros_like(x),
    "minus_zeros": lambda x: x - torch.zeros(4, 6, device=x.device, dtype=x.dtype),
    "of_a_view": lambda x: x.view(24).view(6, 4).t() * torch.ones_like(x),
    "twice_over": lambda x: (x * torch.ones_like(x) + torch.zeros_like(x)) / torch.ones_like(x),
    "cast_and_back": lambda x: x.double().to(x.dtype),
    "cloned": lambda x: x.clone(),
}  # fmt: skip


def _differentiated(p: Probe, same: Same) -> None:
    """The input stays a leaf, which gets gradients from each result."""
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))
    one, two = p.compile(lambda a: (a * 1 * 1, same(a)))(x)
    p.value("leaf", torch.tensor(x.is_leaf))
    with p.backward():
        one.sum().backward()
        (two * 2).sum().backward()


def _changed_result(p: Probe, same: Same) -> None:
    """A result is changed in place, and the input stays as it is."""
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))
    out = p.compile(lambda a: (same(a), a.sin()))(x)[0]
    out.mul_(3)
    p.value("x", x.detach())
    with p.backward():
        out.sum().backward()


def _changed_result_of_plain_inputs(p: Probe, same: Same) -> None:
    """Nothing is differentiated: a result is changed in place, and the input stays as it is."""
    x = p.randn(4, 6)
    p.compile(same)(x).mul_(3)
    p.value("x", x)


def _changed_input(p: Probe, same: Same) -> None:
    """The input is changed in place, and what was saved for the backward stays as it is."""
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))
    out = p.compile(lambda a: same(a).sin())(x)
    with torch.no_grad():
        x.mul_(3)
    with p.backward():
        out.sum().backward()


def _change_inside(p: Probe, same: Same) -> None:
    """The function changes its input after it made the result."""
    x = p.randn(4, 6)

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        out = same(a)
        a.mul_(3)
        return out, same(a)

    for number, out in enumerate(p.compile(run)(x)):
        p.value(f"out{number}", out.mul(2))
        out.zero_()
    p.value("x", x)


def _two_results(p: Probe, same: Same) -> None:
    """One of two equal results is changed in place, and the other stays as it is."""
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = a.exp()
        return same(made), same(made), made

    for results in (p.compile(run)(x), p.compile(run)(x)[::-1]):
        with torch.no_grad():
            for number, out in enumerate(results):
                out.mul_(number + 2)
        for number, out in enumerate(results):
            p.value(f"out{number}", out.detach())


def _changed_gradient(p: Probe, same: Same) -> None:
    """A gradient equals the cotangent. It is changed in place, and the cotangent stays as it is."""
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))
    y = p.leaf("y", p.randn(4, 6, requires_grad=True))
    out = p.compile(lambda a, b: same(a) + same(b))(x, y)
    cotangent = p.randn(4, 6)
    with p.backward():
        out.backward(cotangent)
    for leaf in (x, y):
        assert leaf.grad is not None
        leaf.grad.mul_(3)
    p.value("cotangent", cotangent)


MANNERS: tuple[Callable[[Probe, Same], None], ...] = (
    _differentiated, _changed_result, _changed_result_of_plain_inputs, _changed_input, _change_inside,
    _two_results, _changed_gradient,
)  # fmt: skip


def _register(name: str, same: Same, manner: Callable[[Probe, Same], None]) -> None:
    def body(p: Probe) -> None:
        manner(p, same)

    body.__name__ = f"compiled_own_memory_{name}{manner.__name__}"
    body.__doc__ = f"{manner.__doc__} The result is the input, {name.replace('_', ' ')}."
    scenario(tags=TAGS, fp64=False)(body)


for _name, _same in SAME.items():
    for _manner in MANNERS:
        _register(_name, _same, _manner)
