"""Tensor subclasses in a backward.

In: a probe. Out: gradients of subclass leaves with the right type, and what happens where types mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


class Wrapped(torch.Tensor):
    """A wrapper around one plain tensor; every operation unwraps, computes and wraps again."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Wrapped({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain_args, plain_kwargs = tree_map_only(Wrapped, lambda w: w.inner, (args, dict(kwargs or {})))
        return tree_map_only(torch.Tensor, Wrapped, func(*plain_args, **plain_kwargs))


@scenario(tags=("subclass",))
def wrapper_subclass_leaf(p: Probe) -> None:
    """A leaf of a wrapper subclass gets a `.grad` of that subclass, through hooks that see the subclass."""
    x = p.leaf("x", Wrapped(p.randn(3)).requires_grad_())
    y = x.sin()
    y.register_hook(p.hook("y"))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    with p.backward():
        (y * x).sum().backward()


@scenario(tags=("subclass",))
def two_tensor_leaf(p: Probe) -> None:
    """A leaf that consists of two tensors gets a gradient that consists of two."""
    x = p.leaf("x", TwoTensor(p.randn(2, 3), p.randn(2, 3)).requires_grad_())
    y = x.exp()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y @ x.t()).sum().backward()
        (x * 2).sum().backward()


@scenario(tags=("subclass",))
def subclass_meets_a_plain_leaf(p: Probe) -> None:
    """Where a subclass and a plain leaf meet, both get gradients of the subclass."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    w = p.leaf("w", p.randn(3, requires_grad=True))
    with p.backward():
        (x * w.sin()).sum().backward()


@scenario(tags=("subclass",))
def layer_with_subclass_parameters(p: Probe) -> None:
    """A layer whose parameters are a wrapper subclass, over two steps."""
    layer = nn.Linear(3, 2)
    for name in ("weight", "bias"):
        plain = getattr(layer, name).detach().to(p.device, p.dtype)
        param = nn.Parameter(Wrapped(plain))
        setattr(layer, name, param)
        p.leaf(name, param)
        param.register_hook(p.hook(name))
    for _ in range(2):
        with p.backward():
            layer(Wrapped(p.randn(4, 3))).pow(2).sum().backward()


@scenario(tags=("subclass",), issue="pytorch#173123")
def plain_gradient_for_a_subclass_output(p: Probe) -> None:
    """A subclass output may be given a plain tensor as its gradient."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    y = p.compile(lambda t: t.sin() * 2)(x)
    with p.backward():
        y.backward(p.randn(3))


class Tagged(torch.Tensor):
    """A subclass without data of its own."""


@scenario(tags=("subclass",))
def tagged_subclass(p: Probe) -> None:
    """A subclass that only marks its tensors: hooks and `.grad` as eager types them."""
    x = p.leaf("x", p.randn(3).as_subclass(Tagged).requires_grad_())
    y = x.sin()
    p.event("type", type(y).__name__)
    y.register_hook(p.hook("y", lambda g: p.event("grad_type", type(g).__name__)))
    with p.backward():
        y.exp().sum().backward()
