"""A decorated function is a method, a class method or a static method where the function would be one."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import retrograd

function = functools.partial(retrograd.aot.function, backend="eager", strict=True)
step = retrograd.compile_step(backend="eager", strict=True)


def methods_of(decorate: Any) -> type:
    """A class with a method of every kind, each decorated."""

    class Base:
        factor = 3.0

        def __init__(self, value: float) -> None:
            self.weight = torch.full((2,), value, requires_grad=True)

        @decorate
        def method(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            """Multiply."""
            return self.weight * x * scale

        @classmethod
        @decorate
        def of_class(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.factor

        @staticmethod
        @decorate
        def static(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @decorate
        @staticmethod
        def static_inside(x: torch.Tensor) -> torch.Tensor:
            return x + 2

        @property
        @decorate
        def negative(self) -> torch.Tensor:
            return -self.weight

        built_in = decorate(torch.neg)
        partial = decorate(functools.partial(torch.mul, other=torch.tensor(2.0)))

    class Derived(Base):
        factor = 5.0

        def method(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().method(x, scale) + 100

    Base.derived = Derived
    return Base


CALLS = {
    "method": lambda cls, x: cls(2.0).method(x),
    "keywords": lambda cls, x: cls(2.0).method(scale=3.0, x=x),
    "two instances": lambda cls, x: [one.method(x) for one in (cls(2.0), cls(3.0), cls(2.0))],
    "a subclass": lambda cls, x: cls.derived(2.0).method(x),
    "through the class": lambda cls, x: cls.method(cls(2.0), x),
    "through the base class": lambda cls, x: cls.method(cls.derived(2.0), x),
    "a class method": lambda cls, x: [cls.of_class(x), cls(2.0).of_class(x), cls.derived.of_class(x)],
    "a static method": lambda cls, x: [cls.static(x), cls(2.0).static(x)],
    "a decorated static method": lambda cls, x: [cls.static_inside(x), cls(2.0).static_inside(x)],
    "a property": lambda cls, x: cls(2.0).negative,
    "what does not bind": lambda cls, x: cls(2.0).built_in(x),
    "a partial": lambda cls, x: cls(2.0).partial(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("decorate", [function, step], ids=["aot.function", "compile_step"])
def test_methods_are_bound_as_in_eager(decorate, call):
    cls, x = methods_of(decorate), torch.ones(2)
    expected = call(methods_of(lambda fn: fn), x)
    for _ in range(3):
        torch.testing.assert_close(call(cls, x), expected, rtol=0, atol=0)


def test_gradients_reach_the_instance_that_was_called():
    one, other = map(methods_of(function), (2.0, 3.0))
    one.method(torch.full((2,), 7.0)).sum().backward()
    assert one.weight.grad.tolist() == [7.0, 7.0]
    assert other.weight.grad is None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(2, 2), 2.0

    @function
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor

    @function
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


def test_methods_of_modules_follow_the_attributes_and_the_copies():
    model, x = Model(), torch.ones(3, 2)
    for model.factor in (2.0, 3.0):
        assert torch.equal(model(x), model.layer(x) * model.factor)
        assert torch.equal(model.loss(x), (model.layer(x) * model.factor).sum())
    other = copy.deepcopy(model)
    other.loss(x).backward()
    assert model.layer.weight.grad is None
    assert other.layer.bias.grad.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("decorate", [function, step], ids=["aot.function", "compile_step"])
def test_dynamo_traces_a_method(decorate):
    one = methods_of(decorate)(2.0)
    found = torch.compile(lambda x: one.method(x) + 1, backend="eager", fullgraph=True)(torch.ones(2))
    assert found.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("decorate", [function, step], ids=["aot.function", "compile_step"])
def test_it_says_of_itself_what_the_function_says(decorate):
    plain, made = methods_of(lambda fn: fn), methods_of(decorate)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made.method, name) == getattr(plain.method, name)
    assert made.method.__wrapped__ is made.method.fn
    assert inspect.signature(made.method) == inspect.signature(plain.method)
    assert inspect.signature(made(1.0).method) == inspect.signature(plain(1.0).method)

    def marked() -> None: ...

    marked.order = 3
    assert decorate(marked).order == 3


def test_of_a_module_it_takes_no_attributes():
    model = nn.Linear(2, 2)
    assert not hasattr(function(model), "_parameters")
    assert function(model).__doc__ == nn.Linear.__doc__


@step
@function
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_step_over_a_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(twice)) is twice


def test_a_bound_method_is_pickled_with_its_instance():
    model = Model()
    loss = pickle.loads(pickle.dumps(model.loss))
    assert torch.equal(loss(torch.ones(1, 2)), model.loss(torch.ones(1, 2)))
    assert loss.__self__ is not model


class Scaled:
    """An object of a plain class, as trainers are."""

    def __init__(self):
        self.factor, self.shift, self.powers = 2.0, torch.ones(3), [1]
        self.layer = nn.Linear(3, 3)
        self.hidden = None

    def __call__(self, x):
        return self.compute(x)

    def compute(self, x):
        out = self.layer(x * self.factor) + self.shift
        return sum(out**power for power in self.powers)

    compiled = retrograd.aot.function(compute, backend="eager", strict=True)


def change_number(one):
    one.factor = 3.0


def change_tensor(one):
    one.shift = torch.full((3,), 5.0)


def change_list(one):
    one.powers.append(2)


def change_layer(one):
    one.layer = nn.Linear(3, 3)


def change_weight(one):
    one.layer.weight = nn.Parameter(torch.ones(3, 3))


def write_into_weight(one):
    with torch.no_grad():
        one.layer.weight.fill_(0.5)


CHANGES = [change_number, change_tensor, change_list, change_layer, change_weight, write_into_weight]


@pytest.mark.parametrize("change", CHANGES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("way", ["method", "bound", "callable", "argument"])
def test_attributes_that_change_after_capture_are_seen(change, way):
    torch.manual_seed(0)
    one, x = Scaled(), torch.randn(2, 3)
    options = {"backend": "eager", "strict": True}
    call = {
        "method": lambda: one.compiled,
        "bound": lambda: retrograd.aot.function(one.compute, **options),
        "callable": lambda: retrograd.aot.function(one, **options),
        "argument": lambda: functools.partial(retrograd.aot.function(Scaled.compute, **options), one),
    }[way]()
    assert torch.equal(call(x), one.compute(x))
    change(one)
    found, expected = call(x), one.compute(x)
    assert torch.equal(found, expected)
    found.sum().backward()
    gradients = [weight.grad.clone() for weight in one.layer.parameters()]
    one.layer.zero_grad()
    expected.sum().backward()
    assert all(map(torch.equal, gradients, [weight.grad for weight in one.layer.parameters()]))


def test_an_object_that_is_unchanged_is_captured_once():
    traced = []

    class Counted(Scaled):
        def compute(self, x):
            traced.append(None)
            return super().compute(x)

        compiled = retrograd.aot.function(compute, backend="eager", strict=True)

    one = Counted()
    for _ in range(4):
        one.compiled(torch.ones(2, 3))
    assert len(traced) == 1


def test_layers_of_an_object_may_have_hooks():
    one, calls = Scaled(), []
    call = retrograd.aot.function(Scaled.compute, backend="eager")
    call(one, torch.ones(2, 3))
    one.layer.register_forward_hook(lambda *_: calls.append(None))
    with pytest.warns(UserWarning, match="hooks"):
        call(one, torch.ones(2, 3))
    assert len(calls) == 1
