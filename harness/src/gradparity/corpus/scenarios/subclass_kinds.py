"""Kinds of wrapper subclasses: nested, with metadata, with attributes of their own, without a protocol.

In: a probe. Out: classes and metadata of gradients and of what hooks see, over several steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _grad(leaf: Tensor) -> Any:
    """The `.grad`, whatever its class."""
    return leaf.grad


class Scaled(torch.Tensor):
    """A tensor in another unit: `inner` times `unit`. Results take the unit of the first operand."""

    inner: Tensor
    unit: Any

    @staticmethod
    def __new__(cls, inner: Tensor, unit: Any) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: Tensor, unit: Any) -> None:
        self.inner, self.unit = inner, unit

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner}, {self.unit})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.unit

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], unit: Any, size: Any, stride: Any) -> Scaled:
        return cls(parts["inner"], unit)

    @classmethod
    def scale(cls, tensor: Scaled) -> Any:
        """What `inner` is multiplied with."""
        return tensor.unit

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Scaled))
        plain = tree_map_only(Scaled, lambda s: s.inner * cls.scale(s), (tuple(args), dict(kwargs or {})))
        result = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, lambda t: cls(t / cls.scale(first), first.unit), result)


class InDict(Scaled):
    """Keeps its unit in a dictionary, which can be changed in place."""

    @classmethod
    def scale(cls, tensor: Scaled) -> Any:
        return tensor.unit["scale"]


class Noted(Scaled):
    """Has a unit that its flattened form does not mention."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], unit: Any, size: Any, stride: Any) -> Scaled:
        return cls(parts["inner"], 1.0)


@scenario(tags=("subclass", "guards"))
def unit_changes_between_steps(p: Probe) -> None:
    """Metadata of a subclass that differs in the next step counts in the next step."""
    for step, unit in enumerate((2.0, 3.0, 2.0, 2)):
        x = p.leaf(f"x{step}", Scaled(p.randn(3), unit).requires_grad_())
        y = x.sin()
        y.register_hook(p.hook("y", lambda g: p.event("unit", repr(g.unit))))
        with p.backward():
            (y * y).sum().backward()
        p.event("unit of grad", repr(_grad(x).unit))


@scenario(tags=("subclass", "guards"))
def unit_in_a_dictionary(p: Probe) -> None:
    """Metadata that is changed in place between two steps counts too, and gradients do not share it."""
    unit = {"scale": 2.0}
    x = p.leaf("x", InDict(p.randn(3), unit).requires_grad_())
    for scale in (2.0, 2.0, 4.0):
        unit["scale"] = scale
        x.grad = None
        with p.backward():
            x.exp().sum().backward()
        p.event("scale", _grad(x).unit["scale"])
        p.value(f"grad{scale}", x.grad)


@scenario(tags=("subclass", "guards"))
def attribute_outside_the_protocol(p: Probe) -> None:
    """An attribute that `__tensor_flatten__` leaves out is still seen by the class in the backward."""
    for step, unit in enumerate((2.0, 5.0, 5.0)):
        x = p.leaf(f"x{step}", Noted(p.randn(3), unit).requires_grad_())
        with p.backward():
            x.exp().pow(2).sum().backward()
        p.event("unit", _grad(x).unit)


@scenario(tags=("subclass", "shapes"))
def unit_that_follows_the_size(p: Probe) -> None:
    """Metadata that holds a size, which changes from step to step."""
    for rows in (4, 5, 6):
        x = p.leaf(f"x{rows}", Scaled(p.randn(rows, 2), rows).requires_grad_())
        with p.backward():
            x.exp().sum().backward()
        p.event("unit", _grad(x).unit)


class Bare(torch.Tensor):
    """A wrapper without a protocol for taking it apart."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Bare:
        made: Bare = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain = tree_map_only(Bare, lambda b: b.inner, (tuple(args), dict(kwargs or {})))
        return tree_map_only(torch.Tensor, Bare, func(*plain[0], **plain[1]))


@scenario(tags=("subclass",))
def subclass_without_a_protocol(p: Probe) -> None:
    """A wrapper that cannot be taken apart: gradients of its class, step by step."""
    x = Bare(p.randn(3)).requires_grad_()
    for _ in range(2):
        y = x.sin()
        y.register_hook(lambda g: p.event("inner", g.inner))
        with p.backward():
            (y * x).sum().backward()
    p.value("grad", _grad(x).inner)


class Peeking(Scaled):
    """Looks at its values to decide what to do."""

    @classmethod
    def scale(cls, tensor: Scaled) -> Any:
        return tensor.unit if tensor.inner.abs().sum().item() < 1e6 else 1.0


@scenario(tags=("subclass",))
def subclass_that_looks_at_its_values(p: Probe) -> None:
    """A subclass whose dispatch depends on its values."""
    x = p.leaf("x", Peeking(p.randn(3), 2.0).requires_grad_())
    y = x.sin()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * x).sum().backward()


class Halves(torch.Tensor):
    """A float tensor kept as small integers and a scale: outer and inner dtype differ."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self) -> str:
        return f"Halves({self.codes}, {self.scale})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Halves:
        return Halves(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            made = Halves(func(args[0].codes), func(args[0].scale))
            return return_and_correct_aliasing(func, tuple(args), kwargs or {}, made)
        plain = tree_map_only(Halves, lambda h: h.codes * h.scale, (tuple(args), dict(kwargs or {})))
        return func(*plain[0], **plain[1])


@scenario(tags=("subclass",))
def quantised_weight(p: Probe) -> None:
    """A weight kept as integers takes part as a float; its gradient is a plain tensor."""
    weight = nn.Parameter(Halves(p.randint(5, 3, 2) - 2, p.rand(3, 1)))
    p.leaf("weight", weight)
    x = p.leaf("x", p.randn(4, 3, requires_grad=True))
    for _ in range(2):
        with p.backward():
            (x @ weight).tanh().sum().backward()
        p.event("class", type(weight.grad).__name__)


@scenario(tags=("subclass",))
def subclass_in_a_buffer(p: Probe) -> None:
    """A buffer of a subclass is saved for backward and differentiated through, never given a gradient."""
    layer = nn.Linear(3, 3)
    layer.mask = nn.Buffer(TwoTensor(p.rand(3), p.rand(3)))
    p.module(layer)
    for _ in range(2):
        with p.backward():
            (layer(p.randn(2, 3)) * layer.mask).sum().backward()
    p.event("grad", layer.mask.grad, type(layer.weight.grad).__name__)


class MyParameter(nn.Parameter):
    """A parameter class of one's own: no data, no dispatch."""


@scenario(tags=("subclass",))
def parameter_class_of_ones_own(p: Probe) -> None:
    """A subclass of Parameter without a dispatch of its own gets plain gradients."""
    x = p.leaf("x", MyParameter(p.randn(3)))
    y = x.sin()
    y.register_hook(p.hook("y", lambda g: p.event("class", type(g).__name__)))
    with p.backward():
        (y * x).sum().backward()
    p.event("class", type(x.grad).__name__)


class Counting(torch.Tensor):
    """Counts the calls that go through Python."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@scenario(tags=("subclass",))
def torch_function_stays_out_of_the_backward(p: Probe) -> None:
    """The engine never calls `__torch_function__`: gradients that meet are plain, whatever class they had."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.clone()
    parts = [y.sin(), y.cos(), y.exp()]
    for part in parts:
        part.register_hook(lambda g: g.as_subclass(Counting))
    y.register_hook(p.hook("y", lambda g: p.event("class", type(g).__name__)))
    root = parts[0].sum() + parts[1].sum() + parts[2].sum()
    Counting.calls = 0
    with p.backward():
        root.backward()
    p.event("calls", Counting.calls)
    p.event("class", type(x.grad).__name__)


@scenario(tags=("subclass",))
def marked_gradients_meet_and_accumulate(p: Probe) -> None:
    """Gradients of a class without data meet directly and are accumulated: what class the sum has."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y, z = x.view(3), x.view(3)
    for view in (y, z):
        view.register_hook(lambda g: g.as_subclass(Counting))
    root = (y * 2).sum() + (z * 3).sum()
    Counting.calls = 0
    with p.backward():
        root.backward()
        p.event("class", type(x.grad).__name__, Counting.calls)
        (x.view(3) * 2).sum().backward()
    p.event("class", type(x.grad).__name__, Counting.calls)
