"""Functions whose contract with autograd a compiler may lose, in every place of a compiled forward.

In: a probe, whose `compile` is the identity for eager. Out: gradients, or eager's errors. One scenario for
each Function and each place: alone, in a module, in a loop, between other operations with a hook, with the
graph kept, with a second derivative, with one of the outputs used only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.function_contracts import APPLIED
from gradparity.probe import Probe

TAGS = ("compiled", "function")


class Layered(nn.Module):
    """Two linear layers with an `APPLIED` between them."""

    def __init__(self, applied: str) -> None:
        super().__init__()
        self.first, self.second, self.applied = nn.Linear(4, 4), nn.Linear(4, 4), applied

    def forward(self, x: Tensor) -> Tensor:
        """The second layer of what is applied to the first."""
        out = APPLIED[self.applied](self.first(x).tanh())
        result: Tensor = self.second(out[0]) + out[1]
        return result


def _alone(p: Probe, applied: str) -> None:
    call = p.compile(lambda a: APPLIED[applied](a * 2))
    for step in range(2):
        x = p.leaf(f"x{step}", p.randn(3, 4, requires_grad=True))
        first, second = call(x)
        p.event("requires_grad", first.requires_grad, second.requires_grad)
        with p.backward():
            (first.sum() + second.sum()).backward()


def _in_a_module(p: Probe, applied: str) -> None:
    model = p.module(Layered(applied))
    call = p.compile(model)
    for _ in range(2):
        out = call(p.randn(3, 4))
        with p.backward():
            out.pow(2).mean().backward()


def _in_a_loop(p: Probe, applied: str) -> None:
    def repeated(x: Tensor) -> Tensor:
        for _ in range(3):
            x = APPLIED[applied](x.sin())[0]
        return x

    call = p.compile(repeated)
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    out = call(x) + x
    with p.backward():
        out.sum().backward()


def _before_a_hook(p: Probe, applied: str) -> None:
    call = p.compile(lambda a: APPLIED[applied](a.cos())[0] * 3)
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    y = x * 2
    y.register_hook(p.hook("y"))
    out = call(y) + y
    out.register_hook(p.hook("out", lambda grad: grad * 3))
    with p.backward():
        out.sum().backward()


def _with_a_kept_graph(p: Probe, applied: str) -> None:
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    first, second = p.compile(lambda a: APPLIED[applied](a * 2))(x)
    with p.backward():
        for step in range(3):
            (grad,) = torch.autograd.grad((first * 2 + second).sum(), x, retain_graph=True)
            p.value(f"grad{step}", grad)


def _differentiated_twice(p: Probe, applied: str) -> None:
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    factor = p.leaf("factor", p.randn(3, 4, requires_grad=True))
    out = p.compile(lambda a: APPLIED[applied](a.sin())[0])(x) * factor
    with p.backward():
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        p.value("first", grad.detach())
        grad.pow(2).sum().backward()


def _first_output(p: Probe, applied: str) -> None:
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    first, _ = p.compile(lambda a: APPLIED[applied](a * 2))(x)
    with p.backward():
        (first.sum() + x.sum()).backward()


def _second_output(p: Probe, applied: str) -> None:
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    _, second = p.compile(lambda a: APPLIED[applied](a * 2))(x)
    with p.backward():
        (second.sum() + x.sum()).backward()


PLACES: dict[str, Callable[[Probe, str], None]] = {
    "alone": _alone,
    "in_a_module": _in_a_module,
    "in_a_loop": _in_a_loop,
    "before_a_hook": _before_a_hook,
    "with_a_kept_graph": _with_a_kept_graph,
    "differentiated_twice": _differentiated_twice,
    "first_output": _first_output,
    "second_output": _second_output,
}


#: Functions whose backward of their first output raises in eager.
RAISE = {"too_few", "too_many", "too_narrow", "a_number", "raises"}


def _raises(applied: str, place: str) -> bool:
    if applied in RAISE:
        return place != "second_output"
    return (applied, place) == ("once_only", "differentiated_twice")


def _register(applied: str, place: str) -> None:
    def body(p: Probe) -> None:
        PLACES[place](p, applied)

    body.__name__ = f"kept_whole_{applied}_{place}"
    doc = f"What the Function {applied!r} says of itself to autograd holds in a compiled forward ({place})."
    body.__doc__ = doc.replace("_", " ")
    scenario(tags=(*TAGS, "errors") if _raises(applied, place) else TAGS)(body)


for _applied in APPLIED:
    for _place in PLACES:
        _register(_applied, _place)
