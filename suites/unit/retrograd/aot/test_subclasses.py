"""Wrapper subclasses: taken apart and put together again, as inputs, outputs, gradients and cotangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import retrograd
from retrograd import aot
from unit.retrograd.aot.against_eager import captured, captures, leaf, tensor
from unit.retrograd.programs import Unit

pytestmark = pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning")


def two(*sizes: int, seed: int = 3, grad: bool = True) -> TwoTensor:
    return TwoTensor(tensor(*sizes, seed=seed), tensor(*sizes, seed=seed + 1)).requires_grad_(grad)


def parts(value: Any) -> Any:
    """The tensors inside; anything else as it is."""
    if isinstance(value, TwoTensor):
        return "two", value.a.tolist(), value.b.tolist(), value.requires_grad
    return ("plain", value.tolist(), value.requires_grad) if isinstance(value, Tensor) else value


#: function, and how its inputs are made
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "one input": (lambda x: x.sin() * 2, lambda: (two(3),)),
    "with a plain one": (lambda x, y: x * y, lambda: (two(3), leaf(3))),
    "a plain one that gets a gradient of the class": (
        lambda x, y: (x * y).exp(),
        lambda: (two(3, grad=False), leaf(3)),
    ),
    "matrix product": (lambda x, w: (x @ w).tanh(), lambda: (two(2, 3), leaf(3, 2))),
    "two of them": (lambda x, y: x * y + x, lambda: (two(3), two(3, seed=8))),
    "made inside": (lambda x, y: TwoTensor(y * 2, y * 3) * x, lambda: (leaf(3), tensor(3, seed=4))),
    "a part of it": (lambda x: x.a * 2, lambda: (two(3, grad=False),)),
    "plain output too": (lambda x, y: (x * 2, y.sin()), lambda: (two(3), leaf(3))),
    "returned as it is": (lambda x: (x, x * 2), lambda: (two(3),)),
    "intermediate and output": (lambda x: (lambda h: (h, h.sin()))(x * 2), lambda: (two(3),)),
    "views": (lambda x: x.t().reshape(-1) * 2, lambda: (two(2, 3),)),
    "without grad": (lambda x: x.exp(), lambda: (two(3, grad=False),)),
    "changed in place": (lambda x: x.mul_(2).sin(), lambda: (two(3, grad=False),)),
}


def run(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    args = make()
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    roots = [r for r in results if r.requires_grad]
    seen = [parts(r) for r in results]
    for root in roots:
        root.backward(torch.ones_like(root), retain_graph=True)
    return seen + [parts(value.grad) for value in args] + [parts(value) for value in args]


@pytest.mark.parametrize("policy", ["min_cut", "save_all", "recompute_all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, policy: str) -> None:
    fn, make = PROGRAMS[name]
    call = aot.function(fn, backend="eager", strict=True, partitioner=policy)
    expected = run(fn, make)
    assert run(call, make) == expected
    assert run(call, make) == expected
    assert captures() == 1


def test_each_part_has_a_placeholder() -> None:
    joint = captured(lambda x: x * 2, two(3))
    assert [str(role) + f" {role.part}" for role in joint.signature.inputs] == [
        "argument args[0] 0",
        "argument args[0] 1",
        "cotangent of boundary 0 0",
        "cotangent of boundary 0 1",
    ]
    assert len(joint.signature.outputs) == 4


def test_the_class_is_guarded() -> None:
    call = aot.function(lambda x: x * 2, backend="eager", strict=True)
    assert type(call(two(3))) is TwoTensor
    assert type(call(leaf(3))) is Tensor
    assert type(call(two(3))) is TwoTensor
    assert captures() == 2


def test_the_metadata_is_guarded() -> None:
    call = aot.function(lambda x: x * 2, backend="eager", strict=True)
    for meta in (2, 2.0, True, 2, 2.0):
        assert call(Unit(torch.ones(3), meta)).meta is meta
    assert captures() == 3


def test_attributes_that_are_not_flattened_do_not_matter() -> None:
    call = aot.function(lambda x: x * 2, backend="eager", strict=True)
    for tags in ([], ["second"]):
        x = Unit(torch.ones(3))
        x.tags = tags
        assert call(x).inner.tolist() == [2] * 3
    assert captures() == 1


def test_metadata_that_cannot_be_compared_is_left_to_eager() -> None:
    call = aot.function(lambda x: x * 2, backend="eager")
    with pytest.warns(retrograd.FallbackWarning, match="not equal to its own copy"):
        assert call(Unit(torch.ones(3), object())).inner.tolist() == [2] * 3


def test_the_size_of_the_parts_is_guarded() -> None:
    call = aot.function(lambda x: x * x.shape[0], backend="eager", strict=True)
    for size in (3, 4, 5):
        x = two(size)
        assert parts(call(x)) == parts(x * size)


def test_a_plain_cotangent_for_an_output_of_the_class() -> None:
    def gradient(call: Callable[..., Any]) -> Any:
        x = two(3)
        call(x).backward(torch.arange(3.0))
        return parts(x.grad)

    call = aot.function(lambda x: x.sin(), backend="eager", strict=True)
    assert gradient(call) == gradient(torch.sin)


def test_a_cotangent_of_the_class_for_a_plain_output() -> None:
    def gradient(call: Callable[..., Any]) -> Any:
        x = leaf(3)
        (found,) = torch.autograd.grad(call(x), x, TwoTensor(torch.ones(3), torch.arange(3.0)))
        return parts(found)

    call = aot.function(lambda x: x.sin(), backend="eager", strict=True)
    assert gradient(call) == gradient(torch.sin)


def test_hooks_see_the_class() -> None:
    x, seen = two(3), []
    x.register_hook(lambda gradient: seen.append(type(gradient)))
    aot.function(lambda x: x * 2, backend="eager", strict=True)(x).sum().backward()
    assert seen == [TwoTensor]


def test_a_parameter_of_the_class() -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(tensor(2, 3), tensor(2, 3, seed=5)))
    x = tensor(4, 3)
    model(x).sum().backward()
    expected, model.weight.grad = parts(model.weight.grad), None
    aot.module(model, backend="eager", strict=True)(x).sum().backward()
    assert parts(model.weight.grad) == expected


def test_second_derivative() -> None:
    def product(call: Callable[..., Any]) -> Any:
        x = two(3)
        y = call(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        return parts(second)

    fn = lambda x: x.sin() * x  # noqa: E731
    assert product(aot.function(fn, backend="eager", strict=True)) == product(fn)


def test_nested_classes() -> None:
    def run_nested(call: Callable[..., Any]) -> Any:
        x = TwoTensor(two(3, grad=False), two(3, seed=9, grad=False)).requires_grad_()
        y = call(x)
        y.backward(torch.ones_like(y))
        return parts(y.a), parts(y.b), parts(x.grad.a), parts(x.grad.b)  # type: ignore[union-attr]

    assert run_nested(aot.function(torch.sin, backend="eager", strict=True)) == run_nested(torch.sin)
