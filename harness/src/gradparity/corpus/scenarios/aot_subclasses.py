"""Tensor subclasses through functions compiled ahead: in, out, mixed, changed in place, as gradients.

In: a probe, whose `compile` is the identity for eager. Out: classes and parts of values and gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "subclass")


def _two(p: Probe, *shape: int) -> Tensor:
    """A leaf of two parts."""
    made: Tensor = TwoTensor(p.randn(*shape), p.randn(*shape)).requires_grad_()
    return made


@scenario(tags=TAGS)
def aot_subclass_in_and_out(p: Probe) -> None:
    """A leaf of two parts gives a result and a gradient of two parts."""
    x = p.leaf("x", _two(p, 3))
    y = p.compile(lambda a: (a * 2).sin())(x)
    p.value("y", y.detach())
    y.register_hook(p.hook("y"))
    with p.backward():
        y.sum().backward()


@scenario(tags=TAGS)
def aot_subclass_and_plain_inputs(p: Probe) -> None:
    """A leaf of two parts and a plain one meet; a plain input goes straight to a plain output."""
    x, w = p.leaf("x", _two(p, 2, 3)), p.leaf("w", p.randn(3, requires_grad=True))
    both, plain = p.compile(lambda a, b: (a * b, b.exp()))(x, w)
    p.event("classes", type(both).__name__, type(plain).__name__)
    with p.backward():
        plain.sum().backward()
        p.value("plain grad", w.grad)
        w.grad = None
        both.sum().backward()


@scenario(tags=TAGS)
def aot_subclass_and_plain_in_turn(p: Probe) -> None:
    """One compiled function gets a plain tensor, one of two parts, and a plain one again."""
    call = p.compile(lambda a: a.exp() * a)
    for step in range(3):
        x = p.leaf(f"x{step}", _two(p, 3) if step == 1 else p.randn(3, requires_grad=True))
        out = call(x)
        p.event(f"class{step}", type(out).__name__)
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS)
def aot_plain_cotangent_then_one_of_two_parts(p: Probe) -> None:
    """An output of two parts takes a plain cotangent and one of its own class, in either order."""
    x = p.leaf("x", _two(p, 3))
    y = p.compile(lambda a: a * 3)(x)
    with p.backward():
        p.value("plain", torch.autograd.grad(y, x, p.randn(3), retain_graph=True))
        own = TwoTensor(p.randn(3), p.randn(3))
        p.value("own", torch.autograd.grad(y, x, own, retain_graph=True))
        p.value("plain again", torch.autograd.grad(y, x, p.randn(3)))


@scenario(tags=TAGS)
def aot_plain_output_with_a_cotangent_of_two_parts(p: Probe) -> None:
    """A plain output takes a cotangent of two parts: the plain leaf's gradient has two parts."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a.sin() * 2)(x)
    with p.backward():
        p.value("grad", torch.autograd.grad(y, x, TwoTensor(p.randn(3), p.randn(3))))


@scenario(tags=(*TAGS, "in-place"))
def aot_subclass_changed_in_place(p: Probe) -> None:
    """An input of two parts is changed in place: both parts of the caller's tensor are."""
    a, w = TwoTensor(p.randn(3), p.randn(3)), p.leaf("w", _two(p, 3))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.mul_(2)
        return a * w

    out = p.compile(run)(a, w)
    p.value("a", a)
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "views"))
def aot_view_of_a_subclass(p: Probe) -> None:
    """A view of an input of two parts shares the memory of both."""
    x = p.leaf("x", _two(p, 2, 3))
    h = x * 2
    row = p.compile(lambda a: a[0])(h)
    p.event("class", type(row).__name__, tuple(row.stride()))
    with p.backward():
        (row * row).sum().backward()


@scenario(tags=TAGS)
def aot_parts_are_taken_out_inside(p: Probe) -> None:
    """A function that makes a tensor of two parts from plain inputs inside, and returns a plain result."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return TwoTensor(a.detach(), b.detach()) * a.sum(), a * b

    both, plain = p.compile(run)(x, y)
    p.value("both", both.detach())
    with p.backward():
        plain.sum().backward()


@scenario(tags=TAGS)
def aot_subclass_parameters(p: Probe) -> None:
    """A layer whose weight has two parts, over two steps of training."""
    layer = nn.Linear(3, 2, bias=False)
    weight = TwoTensor(p.randn(2, 3), p.randn(2, 3))
    layer.weight = nn.Parameter(weight)
    p.leaf("weight", layer.weight)
    run = p.compile(layer)
    for _ in range(2):
        with p.backward():
            run(p.randn(4, 3)).square().sum().backward()
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad * 0.1)
    p.value("weight", layer.weight.detach())


class Labelled(torch.Tensor):
    """A tensor with a label, which results take over from their first operand."""

    inner: Tensor
    label: str

    @staticmethod
    def __new__(cls, inner: Tensor, label: str) -> Labelled:
        made: Labelled = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: Tensor, label: str) -> None:
        self.inner, self.label = inner, label

    def __repr__(self) -> str:
        return f"Labelled({self.inner}, {self.label!r})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner"], self.label

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], label: str, size: Any, stride: Any) -> Labelled:
        return Labelled(parts["inner"], label)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Labelled))
        plain_args, plain_kwargs = tree_map_only(Labelled, lambda t: t.inner, (tuple(args), kwargs))
        result = func(*plain_args, **plain_kwargs)
        made = tree_map_only(torch.Tensor, lambda t: Labelled(t, first.label), result)
        return return_and_correct_aliasing(func, args, kwargs, made)


@scenario(tags=TAGS)
def aot_metadata_of_a_subclass_changes(p: Probe) -> None:
    """A subclass with a label: results and gradients carry the label of their own call."""
    call = p.compile(lambda a: a * a)
    for step, label in enumerate(("metres", "feet", "metres")):
        x = p.leaf(f"x{step}", Labelled(p.randn(3), label).requires_grad_())
        out: Any = call(x)
        with p.backward():
            out.sum().backward()
        grad: Any = x.grad
        p.event(f"labels{step}", type(out).__name__, out.label, grad.label)


@scenario(tags=TAGS)
def aot_subclass_in_a_subclass(p: Probe) -> None:
    """Two parts of which each has two parts."""
    inner = [TwoTensor(p.randn(2), p.randn(2)) for _ in range(2)]
    x = p.leaf("x", TwoTensor(*inner).requires_grad_())
    out = p.compile(lambda a: a.sin() * a)(x)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_subclasses_of_several_sizes(p: Probe) -> None:
    """Sizes change from call to call; what is returned has numbers for sizes, and so have its parts."""

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a.sin() * a.shape[0] + b
        return c, c.reshape(-1)[: b.shape[1]] * a.shape[1]

    call = p.compile(run)
    for step, (rows, columns) in enumerate(((2, 3), (4, 3), (5, 6), (2, 2))):
        nested = TwoTensor(_two(p, rows, columns).detach(), _two(p, rows, columns).detach()).requires_grad_()
        for name, a in (("two", _two(p, rows, columns)), ("nested", nested)):
            x = p.leaf(f"{name}{step}", a)
            y = p.leaf(f"{name}{step}_plain", p.randn(rows, columns, requires_grad=True))
            shown = call(x, y)
            p.value(f"shown {name}{step}", shown)
            with p.backward():
                (shown[0].sum() + shown[1].square().sum()).backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_what_is_saved_of_two_parts_is_changed(p: Probe) -> None:
    """The version of what holds the parts says that what the backward reads was changed."""
    kinds = ("leaf", "inner", "result")
    for size, kind, by_alias, has_parts in itertools.product((1, 3), kinds, (False, True), (False, True)):
        x = _two(p, size)
        given = x * 1 if kind == "inner" else x
        out = p.compile(lambda a: a.exp() if kind == "result" else a.abs())(given)
        changed = out if kind == "result" else given
        with torch.no_grad():
            (changed.detach() if by_alias else changed).mul_(2)
        cotangent = TwoTensor(torch.ones(size), torch.ones(size)) if has_parts else torch.ones(size)
        try:
            out.backward(cotangent)
        except RuntimeError as error:
            p.event(f"{size} {kind}", str(error)[:60])
        p.event("grad", type(x.grad).__name__)


@scenario(tags=(*TAGS, "in-place"))
def aot_result_of_two_parts_is_changed_and_not_read(p: Probe) -> None:
    """What no backward reads may be changed, and what is changed under `no_grad` is."""
    x = p.leaf("x", _two(p, 3))
    out, other = p.compile(lambda a: (a * 2, a.exp()))(x)
    out.add_(1)
    with torch.no_grad():
        out.mul_(2)
    p.value("out", out.detach())
    with p.backward():
        (out.sum() + other.sum()).backward()


@scenario(tags=TAGS)
def aot_subclass_outputs_that_are_views_of_one_another(p: Probe) -> None:
    """A value and views of it are returned, of a subclass: changes of one are seen in the others."""
    views: dict[str, Callable[[Any], Any]] = {
        "row": lambda t: t[0],
        "turned": lambda t: t.t(),
        "flat": lambda t: t.view(-1),
        "detached": lambda t: t.detach(),
    }
    for name, view in views.items():
        for needs_grad in (False, True):
            for has_base in (False, True):

                def run(x: Any, view: Callable[[Any], Any] = view, both: bool = has_base) -> list[Any]:
                    value = x * x
                    return [view(value), view(value), *([value] if both else [])]

                x = TwoTensor(p.randn(2, 2), p.randn(2, 2)).requires_grad_(needs_grad)
                made = p.compile(run)(x)
                if name != "detached" and needs_grad:
                    with p.backward():
                        sum((one * number).sum() for number, one in enumerate(made, 1)).backward()
                    p.value(f"{name} grad {has_base}", (x.grad.a, x.grad.b))
                with torch.no_grad():
                    made[-1].mul_(2)
                p.value(f"{name} {needs_grad} {has_base}", [part for one in made for part in (one.a, one.b)])
