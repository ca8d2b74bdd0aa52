"""Objects that a captured function reads, and that change between its calls."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from retrograd import aot


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value

    @property
    def through_a_property(self) -> Any:
        return self.value.value


class Slots:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any = 2.0) -> None:
        self.value = value


class SlotsAndDict(Slots):
    pass


class PrivateSlots:
    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value

    value = property(
        lambda self: self.__value, lambda self, value: setattr(self, "_PrivateSlots__value", value)
    )


@dataclasses.dataclass
class Data:
    value: Any


class Dict(dict[Any, Any]):
    pass


class List(list[Any]):
    pass


class Module(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.inner = value, nn.Linear(1, 1)


class Dropping(nn.Module):
    """Reads 2 in training mode, and 3 otherwise."""

    value = property(lambda self: 2.0 if self.training else 3.0)


def in_a_cycle() -> Plain:
    one = Plain(Plain(2.0))
    one.value.back = one
    return one


def item(key: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    return lambda it: it[key], lambda it, value: it.__setitem__(key, value)


VALUE: Any = (lambda it: it.value, lambda it, value: setattr(it, "value", value))

#: what holds 2.0, and how to read and replace that.
HELD: dict[str, tuple[Callable[[], Any], Any]] = {
    "object": (lambda: Plain(2.0), VALUE),
    "slots": (Slots, VALUE),
    "slots of a base class": (lambda: SlotsAndDict(2.0), VALUE),
    "private slots": (lambda: PrivateSlots(2.0), VALUE),
    "data class": (lambda: Data(2.0), VALUE),
    "namespace": (lambda: types.SimpleNamespace(value=2.0), VALUE),
    "module": (lambda: Module(2.0), VALUE),
    "training": (Dropping, (lambda it: it.value, lambda it, value: it.train(value == 2.0))),
    "cycle": (
        in_a_cycle,
        (lambda it: it.value.back.value.value, lambda it, v: setattr(it.value, "value", v)),
    ),
    "property": (
        lambda: Plain(Plain(2.0)),
        (lambda it: it.through_a_property, lambda it, v: VALUE[1](it.value, v)),
    ),
    "list": (lambda: [2.0], item(0)),
    "dictionary": (lambda: {"a": 2.0}, item("a")),
    "subclass of list": (lambda: List([2.0]), item(0)),
    "subclass of dict": (lambda: Dict(a=2.0), item("a")),
    "ordered": (lambda: collections.OrderedDict(a=2.0), item("a")),
    "default": (lambda: collections.defaultdict(float, a=2.0), item("a")),
    "deque": (lambda: collections.deque([2.0]), item(0)),
    "set": (lambda: {2.0}, (min, lambda it, value: (it.clear(), it.add(value)))),
    "array": (lambda: array.array("d", [2.0]), item(0)),
    "numpy": (lambda: np.array([2.0]), (lambda it: float(it[0]), item(0)[1])),
    "bytes": (
        lambda: bytearray([2]),
        (lambda it: float(it[0]), lambda it, value: item(0)[1](it, int(value))),
    ),
    "tensor": (lambda: Plain(torch.tensor(2.0)), (VALUE[0], lambda it, v: VALUE[1](it, torch.tensor(v)))),
    "tensor in place": (lambda: torch.tensor(2.0), (lambda it: it, lambda it, value: it.fill_(value))),
    "added": (
        lambda: Plain(1.0),
        (lambda it: getattr(it, "more", 2.0), lambda it, v: setattr(it, "more", v)),
    ),
    "added slot": (lambda: Slots.__new__(Slots), (lambda it: getattr(it, "value", 2.0), VALUE[1])),
    "partial": (
        lambda: functools.partial(Plain.read, Plain(2.0)),
        (lambda it: it(), lambda it, v: VALUE[1](it.args[0], v)),
    ),
    "method": (lambda: Plain(2.0).read, (lambda it: it(), lambda it, v: VALUE[1](it.__self__, v))),
}

#: what holds that, and how to reach it.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda held: held, lambda it: it),
    "object": (Plain, VALUE[0]),
    "object in object": (lambda held: Plain(Plain(held)), lambda it: it.value.value),
    "slots": (lambda held: Plain(Slots(held)), lambda it: it.value.value),
    "module": (Module, VALUE[0]),
    "tuple": (lambda held: Plain((1, held)), lambda it: it.value[1]),
    "list in dictionary": (lambda held: Plain({"a": [held]}), lambda it: it.value["a"][0]),
    "deque": (lambda held: Plain(collections.deque([held])), lambda it: it.value[0]),
    "partial": (lambda held: Plain(functools.partial(min, held)), lambda it: it.value.args[0]),
}


def cases() -> Iterator[Any]:
    for held in HELD:
        for holder in HOLDERS:
            yield pytest.param(held, holder, id=f"{held} in {holder}")


@pytest.mark.parametrize(("held", "holder"), [*cases()])
def test_what_changes_in_an_argument_is_seen(held: str, holder: str) -> None:
    (make, (read, put)), (hold, reach) = HELD[held], HOLDERS[holder]
    called = aot.function(lambda x, it: x * read(reach(it)), backend="eager", strict=True)
    argument, x, found = hold(make()), torch.ones(()), list[float]()
    for value in (2.0, 2.0, 3.0, 3.0, 2.0):
        if found and value != found[-1]:
            put(reach(argument), value)
        found.append(called(x, argument).item())
    assert found == [2.0, 2.0, 3.0, 3.0, 2.0]


def test_equal_values_in_new_objects_are_no_change() -> None:
    traced = list[int]()

    def fn(x: torch.Tensor, it: Any) -> torch.Tensor:
        traced.append(1)
        return x * it.value.value["a"][0].value

    called, it = aot.function(fn, backend="eager", strict=True), Plain(Data({"a": [Data(2.0)]}))
    for _ in range(5):
        assert called(torch.ones(()), it).item() == 2.0
        it.value = Data({"a": [Data(2.0)]})
    assert len(traced) == 1
    it.value.value["a"][0].value = 3.0  # the newest object is the one that is looked into
    assert called(torch.ones(()), it).item() == 3.0


class Number(float):
    pass


class Twice(Plain):
    def other(self) -> Any:
        return self.value + 1


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(weight)
    return layer


HOST = Twice(2.0)

#: makes of 2 and 3 two objects that hold equal attributes, and how a number is read from them.
REPLACED: dict[str, tuple[Callable[[float], Any], Callable[[Any], Any]]] = {
    "module": (linear, lambda it: it(torch.ones(1)).sum()),
    "modules in a list": (lambda v: [linear(v)], lambda it: it[0](torch.ones(1)).sum()),
    "subclass of float": (Number, lambda it: it),
    "exception": (ValueError, lambda it: it.args[0]),
    "method": (lambda v: HOST.read if v == 2 else HOST.other, lambda it: it()),
    "partial": (lambda v: functools.partial(HOST.read if v == 2 else HOST.other), lambda it: it()),
    "order": (
        lambda v: collections.OrderedDict([("a", 2.0), ("b", 3.0)][:: 1 if v == 2 else -1]),
        lambda it: next(iter(it.values())),
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", REPLACED)
def test_an_object_that_is_replaced_is_another(kind: str, holder: str) -> None:
    (make, read), (hold, reach) = REPLACED[kind], HOLDERS[holder]
    called = aot.function(lambda x, it: x * read(reach(it.value)), backend="eager", strict=True)
    it, x = Plain(None), torch.ones((), requires_grad=True)
    for value in (2.0, 3.0, 3.0, 2.0):
        it.value = hold(make(value))
        out = called(x, it)
        assert out.item() == value
        assert torch.autograd.grad(out, x)[0].item() == value


def test_the_order_of_an_ordered_dictionary_is_seen() -> None:
    it = Plain(collections.OrderedDict(a=2.0, b=3.0))
    called = aot.function(lambda x, it: x * next(iter(it.value.values())), backend="eager", strict=True)
    assert called(torch.ones(()), it).item() == 2.0
    it.value.move_to_end("a")
    assert called(torch.ones(()), it).item() == 3.0


class Refuses:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class DictThatRefuses:
    __slots__ = ()
    __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


def dead_proxy() -> Any:
    return weakref.proxy(Plain(1))


@pytest.mark.parametrize("make", [Refuses, DictThatRefuses, dead_proxy])
def test_what_cannot_be_read_is_left_out(make: Callable[[], Any]) -> None:
    it = Plain(make())
    called = aot.function(lambda x, it: x * it.factor, backend="eager", strict=True)
    for factor in (2.0, 3.0, 3.0):
        it.factor = factor
        assert called(torch.ones(()), it).item() == factor


def test_parameters_of_modules_deep_inside_get_gradients() -> None:
    it = Plain([Slots(nn.Linear(2, 2))])
    x = torch.ones(2)
    aot.function(lambda x, it: it.value[0].value(x).sum(), backend="eager", strict=True)(x, it).backward()
    assert torch.equal(it.value[0].value.weight.grad, torch.ones(2, 2))


def test_objects_of_other_packages_are_constants() -> None:
    """An optimizer and a logger change with every step."""
    traced = list[int]()

    class Trainer(Plain):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            traced.append(1)
            return self.value(x).sum()

    trainer = Trainer(nn.Linear(2, 2))
    trainer.optimizer = torch.optim.Adam(trainer.value.parameters())
    step = aot.function(trainer.step, backend="eager", strict=True)
    for _ in range(4):
        trainer.optimizer.zero_grad()
        step(torch.ones(2)).backward()
        trainer.optimizer.step()
    assert len(traced) == 1
