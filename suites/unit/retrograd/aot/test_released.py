"""Inputs that a compiled function does not hold until its backward.

What eager computes is asked of eager in the same test. Inputs count as large from one byte on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from retrograd import aot
from retrograd.aot import droppable as released
from retrograd.errors import CaptureError
from unit.retrograd.aot.against_eager import leaf, tensor

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released, "FEWEST_BYTES", 1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x  # no saved tensor: nobody can give it another value
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.scale


MASK, OTHER = tensor(4, 6) > 0, tensor(4, 6, seed=5)
CLASSES = torch.tensor([0, 5, 2, 1])


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(MASK, 0.5)


def gated(x: Tensor) -> Tensor:
    left, right = masked(x).chunk(2, -1)
    return functional.silu(left) * right


def added(x: Tensor) -> tuple[Tensor, Tensor]:
    total = x + OTHER
    return total, functional.layer_norm(total, (6,))


def loss(x: Tensor) -> Tensor:
    return functional.cross_entropy(masked(x), CLASSES)


def attention(x: Tensor) -> Tensor:
    heads = masked(x).view(1, 2, 4, 3)
    return functional.scaled_dot_product_attention(heads, heads * 2, heads.sin())


RELEASED: dict[str, Fn] = {
    "a mask": masked,
    "a mask before a gate": gated,
    "a sum that is given back, before a norm": added,
    "a mask before a loss": loss,
    "a dropout": lambda x: functional.dropout(masked(x), 0.5).exp(),
    "numbers of a list": lambda x: masked(x)[[0, 2], [1, 1]].exp(),
    "an operation in place": lambda x: masked(x).mul_(2).tanh(),
}
HELD: dict[str, Fn] = {
    "eager saves it": lambda x: x.exp() * x,
    "eager saves a view of it": lambda x: x.view(-1).pow(3),
    "a Function saves what it likes": lambda x: Doubled.apply(masked(x)),
    "an operator may refuse zeros": lambda x: torch.linalg.inv(masked(x)[:, :4] + torch.eye(4)),
    "a part is changed in place": lambda x: _with_a_changed_row(masked(x)).exp(),
}


def _with_a_changed_row(x: Tensor) -> Tensor:
    x[0].mul_(2)
    return x


def outputs_of(call: Fn, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    out = call(x)
    return [out] if isinstance(out, Tensor) else list(out)


def second_derivatives(call: Fn, between: Fn = lambda x: None) -> list[Tensor]:
    x = leaf(4, 6)
    inner = x * 1
    outs = outputs_of(call, inner)
    between(inner)
    (first,) = torch.autograd.grad([(out * out).sum() for out in outs], x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x)
    return [first, second]


def is_held(call: Fn) -> bool:
    inner = leaf(4, 6) * 1
    outs = outputs_of(call, inner)
    known = weakref.ref(inner)
    del inner
    gc.collect()
    is_alive = known() is not None
    del outs
    return is_alive


@pytest.mark.parametrize("name", RELEASED)
def test_it_is_not_held_where_all_that_eager_saves_is_known(name: str) -> None:
    call = aot.function(RELEASED[name], backend="eager", strict=True)
    assert not is_held(call)
    assert second_derivatives(call)[0].equal(second_derivatives(RELEASED[name])[0])
    torch.testing.assert_close(second_derivatives(call), second_derivatives(RELEASED[name]))


def test_it_is_not_held_where_eager_has_no_second_derivative() -> None:
    call = aot.function(attention, backend="eager", strict=True)
    assert not is_held(call)
    found = []
    for each in (attention, call):
        x = leaf(4, 6)
        found.append(torch.autograd.grad(each(x * 1).sum(), x, create_graph=True)[0])
    assert found[0].equal(found[1])


def test_it_is_not_held_where_a_copy_of_it_is_saved() -> None:
    def run(x: Tensor) -> Tensor:
        return functional.cross_entropy(x.float(), CLASSES)

    def derivatives(call: Fn) -> list[Tensor]:
        x = leaf(4, 6)
        (first,) = torch.autograd.grad(call(x.bfloat16()), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), x)]

    call = aot.function(run, backend="eager", strict=True)
    inner = leaf(4, 6).bfloat16()
    known, out = weakref.ref(inner), call(inner)
    del inner
    assert known() is None
    torch.testing.assert_close(derivatives(call), derivatives(run))
    del out


def test_a_function_that_switches_autograd_on_has_a_second_derivative() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return gated(x)

    def derivatives(call: Fn) -> list[Tensor]:
        x = leaf(4, 6)
        inner = x * 1
        with torch.no_grad():
            out = call(inner)
        (first,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), x)]

    call = aot.function(run, backend="eager", strict=True)
    torch.testing.assert_close(derivatives(call), derivatives(run))


def test_it_is_held_beside_a_wrapper_subclass() -> None:
    def run(pair: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x + OTHER).exp(), pair * 2

    def derivatives(call: Fn) -> list[Tensor]:
        x, pair = leaf(4, 6), TwoTensor(tensor(2, 2), tensor(2, 2, seed=5))
        out, _ = call(pair, x * 1)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), x)]

    torch.testing.assert_close(derivatives(aot.function(run, backend="eager")), derivatives(run))


@pytest.mark.parametrize("name", HELD)
def test_it_is_held_where_a_second_run_needs_it(name: str) -> None:
    call = aot.function(HELD[name], backend="eager")
    assert is_held(call)
    torch.testing.assert_close(second_derivatives(call), second_derivatives(HELD[name]))


def test_what_is_not_held_may_change() -> None:
    call = aot.function(gated, backend="eager", strict=True)

    def change(x: Tensor) -> None:
        x.detach().zero_()

    torch.testing.assert_close(second_derivatives(call, change), second_derivatives(gated, change))


def test_hooks_of_what_is_not_held_see_what_they_see_in_eager() -> None:
    seen: dict[str, list[Tensor]] = {"eager": [], "compiled": []}
    calls = {"eager": gated, "compiled": aot.function(gated, backend="eager", strict=True)}
    for name, call in calls.items():
        x = leaf(4, 6)
        inner = x * 1
        inner.register_hook(seen[name].append)
        inner.retain_grad()
        (first,) = torch.autograd.grad(call(inner).sum(), x, create_graph=True)
        first.sin().sum().backward()
        seen[name] += [inner.grad, x.grad]  # type: ignore[list-item]
    torch.testing.assert_close(seen["compiled"], seen["eager"])
    assert len(seen["eager"]) == 4


def test_a_second_run_that_goes_another_way_is_refused() -> None:
    way = {"other": False}

    def moody(x: Tensor) -> Tensor:
        return masked(x).exp() if not way["other"] else masked(x).sin()

    call = aot.function(moody, backend="eager", strict=True)
    x = leaf(4, 6)
    out = call(x * 1)
    way["other"] = True
    with pytest.raises(CaptureError, match="ExpBackward0, a second run has SinBackward0"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
