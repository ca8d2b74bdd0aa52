"""What a program does besides tensors, in every place where a compiler might run it twice, or never again.

In: a probe, whose `compile` is the identity for eager. Out: the state of Python objects after each
call and each backward, and what was printed. One kind of call looks at elements behind the effect, where some
traces end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

Effect = Callable[[], object]
Call = Callable[[Tensor], Tensor]
Seen = Callable[[], object]


def _list() -> tuple[Effect, Seen]:
    seen: list[int] = []
    return lambda: seen.append(len(seen)), lambda: seen


def _dictionary() -> tuple[Effect, Seen]:
    seen: dict[str, int] = {}
    return lambda: seen.update(runs=seen.get("runs", 0) + 1), lambda: seen


def _class() -> tuple[Effect, Seen]:
    class Counter:
        runs = 0

    def effect() -> None:
        Counter.runs += 1

    return effect, lambda: Counter.runs


def _variable() -> tuple[Effect, Seen]:
    runs = 0

    def effect() -> None:
        nonlocal runs
        runs += 1

    return effect, lambda: runs


def _printed() -> tuple[Effect, Seen]:
    return lambda: print("here"), lambda: None  # noqa: T201


#: what makes an effect, and what shows it.
EFFECTS: dict[str, Callable[[], tuple[Effect, Seen]]] = {
    "list": _list,
    "dictionary": _dictionary,
    "class_attribute": _class,
    "variable": _variable,
    "printed": _printed,
}


class Acting(torch.autograd.Function):
    """Has an effect in its forward, in its backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Effect, after: Effect) -> Tensor:
        before()
        ctx.after = after
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.after()
        return grad * 2, None, None


class Module(nn.Module):
    """A layer with an effect."""

    def __init__(self, effect: Effect) -> None:
        super().__init__()
        self.effect = effect

    def forward(self, x: Tensor) -> Tensor:
        self.effect()
        return x.sin()


def _nothing() -> None:
    pass


def _in_a_function(effect: Effect) -> Call:
    def call(x: Tensor) -> Tensor:
        effect()
        return x.sin()

    return call


def _before_a_look(effect: Effect) -> Call:
    def call(x: Tensor) -> Tensor:
        effect()
        return x * 2 if x.sum() > 0 else x * 3

    return call


def _of_a_module(effect: Effect) -> Call:
    return Module(effect)


def _in_a_forward_hook(effect: Effect) -> Call:
    module = Module(_nothing)
    module.register_forward_hook(lambda *_: effect() and None)
    return module


def _in_a_functions_forward(effect: Effect) -> Call:
    return lambda x: Acting.apply(x.sin(), effect, _nothing)


def _in_a_functions_backward(effect: Effect) -> Call:
    return lambda x: Acting.apply(x.sin(), _nothing, effect).cos()


def _in_a_checkpoint(effect: Effect) -> Call:
    return lambda x: checkpoint(Module(effect), x, use_reentrant=False).cos()


def _in_a_hook(effect: Effect) -> Call:
    def call(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: effect() and None)
        return y.cos()

    return call


#: where the effect is.
PLACES: dict[str, Callable[[Effect], Call]] = {
    "in_a_function": _in_a_function,
    "before_a_look_at_values": _before_a_look,
    "of_a_module": _of_a_module,
    "in_a_forward_hook": _in_a_forward_hook,
    "in_a_functions_forward": _in_a_functions_forward,
    "in_a_functions_backward": _in_a_functions_backward,
    "in_a_checkpoint": _in_a_checkpoint,
    "in_a_hook": _in_a_hook,
}


def _register(place: str, kind: str) -> None:
    def body(p: Probe) -> None:
        effect, seen = EFFECTS[kind]()
        call = p.compile(PLACES[place](effect))
        x = p.leaf("x", p.randn(3, requires_grad=True))
        for number in range(3):
            out = call(x)
            p.value(f"after call {number}", seen())
            with p.backward():
                out.sum().backward()
            p.value(f"after backward {number}", seen())

    body.__name__ = f"effects_happen_once_{place}_{kind}"
    where = place.replace("_", " ")
    body.__doc__ = f"A change that Python sees ({kind}) happens as often as eager makes it: {where}."
    scenario(tags=("compiled", "aot", "side-effects"))(body)


for _place in PLACES:
    for _kind in EFFECTS:
        _register(_place, _kind)
