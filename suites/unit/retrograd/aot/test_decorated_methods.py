"""Modules whose methods are compiled ahead of time, and that are compiled with Dynamo too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd import aot


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).sin()
        return out


class Eager(Base):
    pass


class InTheClass(Base):
    @aot.function
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).sin()
        return out


class WithOptions(Base):
    forward = aot.function(Base.forward, backend="eager", strict=True)


class Inherited(WithOptions):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out


class OtherMethod(Base):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.step(x)
        return out

    step = aot.function(Base.forward, backend="eager", strict=True)


class OnTheInstance(Base):
    def __init__(self) -> None:
        super().__init__()
        self.forward = aot.function(self.forward, backend="eager", strict=True)  # type: ignore[method-assign]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithOptions()
        self.layer = self.inner.layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def in_place(module: nn.Module) -> Any:
    module.compile(backend="eager")
    return module


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "not at all": lambda module: module,
    "torch": lambda module: torch.compile(module, backend="eager"),
    "one graph": lambda module: torch.compile(module, backend="eager", fullgraph=True),
    "aot_eager": lambda module: torch.compile(module, backend="aot_eager"),
    "backend": lambda module: torch.compile(module, backend="retrograd", options={"backend": "eager"}),
    "retrograd": lambda module: retrograd.compile(module, backend="eager"),
    "in place": in_place,
    "its forward": lambda module: torch.compile(module.forward, backend="eager"),
    "staged": lambda module: aot.module(module, backend="eager", strict=True),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("kind", [WithOptions, Inherited, OtherMethod, OnTheInstance, Outer])
def test_a_module_with_a_decorated_method_is_compiled(kind: type[nn.Module], how: str) -> None:
    def run(called: Any, module: Any) -> list[Any]:
        found = []
        for rows in (2, 2, 3):
            y = called(torch.ones(rows, 4))
            found += [y, *torch.autograd.grad(y.sum(), [*module.parameters()])]
        return [value.tolist() for value in found]

    module, eager = kind(), Eager()
    if kind is Inherited and how == "one graph":  # Dynamo follows `super()` to functions only
        with pytest.raises(torch._dynamo.exc.Unsupported):
            run(COMPILED[how](module), module)
        return
    assert run(COMPILED[how](module), module) == run(eager, eager)


def test_a_method_decorated_with_default_options_is_compiled_by_dynamo() -> None:
    x = torch.ones(2, 4)
    assert torch.equal(torch.compile(InTheClass(), backend="eager")(x), Eager()(x))


def test_a_decorated_method_is_a_bound_method() -> None:
    module, other = WithOptions(), WithOptions()
    assert module.forward == module.forward != other.forward
    assert module.forward.__self__ is module
    assert module.forward.__name__ == "forward"
    assert isinstance(WithOptions.forward, aot.function(Base.forward).__class__)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(torch.ones(2, 4)), module(torch.ones(2, 4)))


class NoModule:
    def go(self, x: Tensor) -> Tensor:
        return x * 2

    go = aot.function(go, backend="eager", strict=True)


@pytest.mark.parametrize(("owner", "name"), [(NoModule, "go"), (WithOptions, "forward")])
def test_a_method_has_what_the_decorated_function_has(owner: Any, name: str) -> None:
    method, function = getattr(owner(), name), getattr(owner, name)
    method(torch.ones(2, 4))
    method.reset()
    assert method.fn is function.fn
    assert method.config is function.config
    assert (method.__func__ is function) == (owner is NoModule)
