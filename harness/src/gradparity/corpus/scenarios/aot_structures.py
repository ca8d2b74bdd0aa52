"""What goes into functions compiled ahead and comes out of them: nested containers, numbers, None, keywords.

In: a probe, whose `compile` is the identity for eager. Out: the same structures, and gradients for all
leaves.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "structure")


class Pair(NamedTuple):
    """Two tensors with names."""

    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Result:
    """A result with a note."""

    value: Tensor
    note: str


def _flatten(result: Result) -> tuple[list[Tensor], str]:
    return [result.value], result.note


def _unflatten(parts: Any, note: Any) -> Result:
    (value,) = parts
    return Result(value, note)


pytree.register_pytree_node(
    Result, _flatten, _unflatten, serialized_type_name="gradparity.corpus.scenarios.Result"
)


@scenario(tags=TAGS)
def aot_nested_containers(p: Probe) -> None:
    """Dictionaries, lists and tuples inside one another come out as they are in eager."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in ("x", "y"))

    def run(batch: dict[str, Any]) -> dict[str, Any]:
        one, (two, factor) = batch["one"], batch["rest"]
        return {"sum": [one + two, {"product": (one * two, factor)}], "none": None, "name": "result"}

    out = p.compile(run)({"one": x, "rest": (y, 3)})
    p.event("structure", *out, len(out["sum"]), type(out["sum"][1]).__name__, out["none"], out["name"])
    product, factor = out["sum"][1]["product"]
    with p.backward():
        (out["sum"][0].exp() + product * factor).sum().backward()


@scenario(tags=TAGS)
def aot_containers_with_types(p: Probe) -> None:
    """A named tuple comes out as that named tuple, an ordered dictionary in its order."""
    x = p.leaf("x", p.randn(2, requires_grad=True))

    def run(pair: Pair) -> tuple[Pair, OrderedDict[str, Tensor]]:
        swapped = Pair(pair.right * 2, pair.left * 3)
        return swapped, OrderedDict([("z", pair.left.sin()), ("a", pair.right.cos())])

    swapped, ordered = p.compile(run)(Pair(x, x.exp()))
    p.event("types", type(swapped).__name__, swapped._fields, type(ordered).__name__, tuple(ordered))
    with p.backward():
        (swapped.left * ordered["z"] + swapped.right * ordered["a"]).sum().backward()


@scenario(tags=TAGS)
def aot_registered_dataclass(p: Probe) -> None:
    """A class that is registered as a container goes in and comes out."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    out = p.compile(lambda r: Result(r.value.sin(), r.note + "!"))(Result(x, "made"))
    p.event("result", type(out).__name__, out.note)
    with p.backward():
        out.value.sum().backward()


@scenario(tags=TAGS)
def aot_outputs_that_are_no_tensors(p: Probe) -> None:
    """Numbers, strings, booleans, sizes and dtypes among the outputs, three calls with other arguments."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor, times: int, flag: bool) -> tuple[Any, ...]:
        return a * times if flag else a / times, times + 1, "yes" if flag else "no", a.shape, a.dim(), None

    call = p.compile(run)
    for step, (times, flag) in enumerate(((2, True), (3, True), (2, False))):
        out, number, text, shape, dimensions, nothing = call(x, times, flag)
        p.event(f"call{step}", number, text, type(shape).__name__, tuple(shape), dimensions, nothing)
        with p.backward():
            out.sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_keywords_and_defaults(p: Probe) -> None:
    """Arguments by position, by keyword, by default, in another order, and gathered."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in ("x", "y"))

    def run(a: Tensor, b: Tensor | None = None, *, scale: float = 1.0, **more: Tensor) -> Tensor:
        total = a * scale if b is None else a * b * scale
        return sum((value * len(name) for name, value in more.items()), total)

    call = p.compile(run)
    calls = (
        lambda: call(x),
        lambda: call(x, y),
        lambda: call(b=x, a=y, scale=2.0),
        lambda: call(x, scale=3.0, one=y, three=x),
        lambda: call(x, three=y, one=x),
    )
    for step, each in enumerate(calls):
        with p.backward():
            each().sum().backward()
        p.value(f"grads{step}", (x.grad, y.grad))


@scenario(tags=TAGS)
def aot_number_of_arguments_changes(p: Probe) -> None:
    """A function of any number of tensors is called with one, three, two and three."""
    leaves = [p.leaf(f"x{i}", p.randn(2, requires_grad=True)) for i in range(3)]
    call = p.compile(lambda *parts: torch.stack(parts).prod(0))
    for step, count in enumerate((1, 3, 2, 3)):
        with p.backward():
            call(*leaves[:count]).sum().backward()
        p.value(f"grads{step}", tuple(leaf.grad for leaf in leaves))


@scenario(tags=(*TAGS, "errors"))
def aot_missing_argument(p: Probe) -> None:
    """A call without a required argument is a TypeError."""
    x = p.randn(2, requires_grad=True)
    call: Any = p.compile(lambda a, b: a * b)
    p.value("sound", call(x, x).detach())
    call(x)


@scenario(tags=(*TAGS, "errors"))
def aot_function_that_raises(p: Probe) -> None:
    """An exception of the function's own comes out with its type."""

    def run(a: Tensor) -> Tensor:
        if a.dim() == 2:
            raise KeyError("no matrices")
        return a.sin()

    call = p.compile(run)
    p.value("sound", call(p.randn(2, requires_grad=True)).detach())
    call(p.randn(2, 2, requires_grad=True))


@scenario(tags=TAGS)
def aot_closure_over_a_leaf(p: Probe) -> None:
    """A leaf that the function closes over gets a gradient, with its value at the time of each call."""
    x, w = (p.leaf(name, p.randn(2, requires_grad=True)) for name in ("x", "w"))
    call = p.compile(lambda a: (a * w).sin())
    for step in range(2):
        with p.backward():
            call(x).sum().backward()
        p.value(f"grads{step}", (x.grad, w.grad))
        with torch.no_grad():
            w.mul_(2)


@scenario(tags=TAGS)
def aot_closure_over_an_intermediate(p: Probe) -> None:
    """An intermediate of the caller that the function closes over connects both graphs."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    h = x.exp()
    h.register_hook(p.hook("h"))
    out = p.compile(lambda a: a * h)(x)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_closure_over_a_number_that_changes(p: Probe) -> None:
    """A number in the function's surroundings is read anew in every call."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    setting = {"factor": 2.0}
    call = p.compile(lambda a: a.sin() * setting["factor"])
    for step in range(3):
        with p.backward():
            call(x).sum().backward()
        p.value(f"grad{step}", x.grad)
        setting["factor"] += 1


@scenario(tags=TAGS)
def aot_returns_a_function(p: Probe) -> None:
    """A function that returns a function over its result."""
    x = p.leaf("x", p.randn(2, requires_grad=True))

    def run(a: Tensor) -> Any:
        hidden = a.sin()
        return lambda b: hidden * b

    out = p.compile(run)(x)(x)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_branch_on_a_value(p: Probe) -> None:
    """A branch that depends on a tensor's value is taken by the value of each call."""
    x = p.leaf("x", p.tensor([1.0, 2.0], requires_grad=True))

    def run(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() if b.sum() > 0 else a.cos() * b

    call = p.compile(run)
    for step, value in enumerate((1.0, -1.0, 2.0, -3.0)):
        with p.backward():
            call(x, p.tensor([value, value])).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_number_read_from_a_tensor(p: Probe) -> None:
    """`item()` gives the number of this call, not that of the first."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    call = p.compile(lambda a, b: a * b.item())
    for step, value in enumerate((2.0, 3.0, 2.0)):
        with p.backward():
            call(x, p.tensor(value)).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_list_changed_by_the_function(p: Probe) -> None:
    """A function that appends its result to the caller's list does so in every call."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    kept: list[Tensor] = []

    def run(a: Tensor, into: list[Tensor]) -> Tensor:
        into.append(a.sin())
        return a * len(into)

    call = p.compile(run)
    for step in range(3):
        out = call(x, kept)
        p.event(f"kept{step}", len(kept))
        with p.backward():
            (out + sum(kept)).sum().backward()
        p.value(f"grad{step}", x.grad)
        kept[:] = [each.detach() for each in kept]
