"""Functions compiled ahead that keep a tensor between calls, somewhere outside of their modules.

In: a probe, whose `compile` is the identity for eager. Out: what each call gives, and a call of the function
itself afterwards: what it kept must have numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "side-effects")


def _calls(p: Probe, fn: Callable[[Tensor], Tensor]) -> None:
    """Three compiled calls, and one of `fn` as it is."""
    run = p.compile(fn)
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for step, one in enumerate([run, run, run, fn]):
        with p.backward():
            one(x * (step + 1)).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_list_in_the_closure_is_filled(p: Probe) -> None:
    """Every call adds to a list, and uses all that is in it."""
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(x.detach() * 2)
        return x * torch.stack(seen).sum(0)

    _calls(p, fn)
    p.event("kept", len(seen))


@scenario(tags=TAGS)
def aot_table_in_the_closure_is_made_once(p: Probe) -> None:
    """The first call fills a dictionary that later ones read."""
    tables: dict[int, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), dtype=x.dtype).exp()
        return x * tables[len(x)]

    _calls(p, fn)
    p.value("table", tables[3])


@scenario(tags=TAGS)
def aot_variable_of_the_closure_is_set(p: Probe) -> None:
    """Every call reads what the last one has left in a variable."""
    before: Tensor | None = None

    def fn(x: Tensor) -> Tensor:
        nonlocal before
        result = x if before is None else x * before
        before = x.detach() + 1
        return result

    _calls(p, fn)


@scenario(tags=TAGS)
def aot_function_caches_its_table(p: Probe) -> None:
    """`functools.cache` keeps what a function made."""

    @functools.cache
    def table(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float32).exp()

    _calls(p, lambda x: x * table(len(x)))
    p.value("table", table(3))


class _Holder:
    """An object that keeps a tensor."""

    def __init__(self) -> None:
        self.table: Tensor | None = None


@scenario(tags=TAGS)
def aot_object_in_the_closure_keeps_a_tensor(p: Probe) -> None:
    """An attribute of an object that the function knows by its closure is set."""
    holder = _Holder()

    def fn(x: Tensor) -> Tensor:
        if holder.table is None:
            holder.table = torch.arange(len(x), dtype=x.dtype)
        return x * holder.table

    _calls(p, fn)


def _remembering() -> type[nn.Module]:
    """A class of modules that keeps a table for all of them."""

    class Remembering(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if type(self).table is None:
                type(self).table = torch.arange(len(x), dtype=x.dtype) + 1
            return x * type(self).table

    return Remembering


@scenario(tags=(*TAGS, "modules"))
def aot_class_of_a_module_keeps_a_tensor(p: Probe) -> None:
    """An attribute of the class is set at the first call."""
    _calls(p, _remembering()())


class _Spiking(nn.Module):
    """Keeps its state in a dictionary of its own, as `_v`."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, Any] = {"v": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        self._states["v"] = self._states["v"] + x.detach() * 0.5
        return x * self._states["v"]


@scenario(tags=(*TAGS, "modules"))
def aot_private_dictionary_of_a_module_is_filled(p: Probe) -> None:
    """A dictionary whose name begins with an underscore holds the state of a module."""
    _calls(p, _Spiking())


class _Late(nn.Module):
    """Makes its buffer at the first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(len(x), dtype=x.dtype), persistent=False)
        return x * self.table


@scenario(tags=(*TAGS, "modules"))
def aot_buffer_is_registered_by_the_first_call(p: Probe) -> None:
    """A buffer that is not there at first."""
    model = _Late()
    _calls(p, model)
    p.event("state", sorted(dict(model.named_buffers())), sorted(model.state_dict()))


class _Averaging(nn.Module):
    """Assigns its buffer and an attribute anew in each call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach() * 2
        self.mean = self.mean * 0.5 + self.last
        return x * self.mean


@scenario(tags=(*TAGS, "modules"))
def aot_module_in_the_closure_assigns_a_buffer(p: Probe) -> None:
    """The module is not given to the function, which knows it from its closure."""
    model = _Averaging()
    _calls(p, lambda x: model(x))
    p.value("state", (model.mean, model.last))
