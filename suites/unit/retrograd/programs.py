"""Programs that the tests share: each returns a fresh root over the leaves it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Square(torch.autograd.Function):
    """x * x, by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def everything(w: Tensor, events: list[str], rows: int = 5) -> Tensor:
    """Every kind of call at once: hooks of all kinds, a custom Function, an in-place view, packed saved
    tensors, and a gradient with four contributions."""
    generator = torch.Generator().manual_seed(rows)
    h = torch.randn(rows, w.shape[0], generator=generator) @ w
    h.register_hook(lambda grad: events.append("tensor h"))
    k = h.clone()
    k[:, 0].mul_(2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (events.append("unpack"), t)[1]):
        q = (k * h).sin()
    y = Square.apply(q) + h.expand_as(h)
    y.grad_fn.register_prehook(lambda grads: events.append("pre y"))
    y.grad_fn.register_hook(lambda grads, outs: events.append("post y"))
    return (y * y).sum() + y.mean() + (h * h).sum() + h.sum()


def leaf(events: list[str] | None = None) -> Tensor:
    """A parameter of 4 x 3; with `events` it has a tensor hook and a post-accumulate hook."""
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(4, 3, generator=generator, requires_grad=True)
    if events is not None:
        w.register_hook(lambda grad: events.append("tensor w"))
        w.register_post_accumulate_grad_hook(lambda p: events.append("accumulated w"))
    return w


def observed(
    context: contextlib.AbstractContextManager[object], program: Callable[..., Tensor], rows: int = 5
) -> tuple[Tensor, list[str]]:
    """The gradient and the events of one backward of `program` inside `context`."""
    events: list[str] = []
    w = leaf(events)
    root = program(w, events, rows)
    with context:
        root.backward()
    assert w.grad is not None
    return w.grad, events


class Unit(torch.Tensor):
    """A wrapper with one piece of metadata; `lost` is an attribute that its flattened form leaves out."""

    @staticmethod
    def __new__(cls, inner, meta=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner, meta=None):
        self.inner, self.meta = inner, meta

    def __repr__(self):
        return f"Unit({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], self.meta

    @classmethod
    def __tensor_unflatten__(cls, parts, meta, size, stride):
        return cls(parts["inner"], meta)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        meta = next(arg.meta for arg in tree_leaves(args) if isinstance(arg, Unit))
        args, kwargs = tree_map_only(Unit, lambda u: u.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda t: cls(t, meta), func(*args, **kwargs))
