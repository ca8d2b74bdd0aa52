"""Where subclass tensors meet: plain tensors, hooks, one another, views, Functions, several steps.

In: a probe. Out: classes, identities and values of gradients, and what hooks see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _grad(leaf: Tensor) -> Any:
    """The `.grad`, whatever its class."""
    return leaf.grad


@scenario(tags=("subclass",))
def nested_two_tensor(p: Probe) -> None:
    """A leaf made of two tensors, each made of two, gets a gradient of the same make."""
    parts = [TwoTensor(p.randn(2, 3), p.randn(2, 3)) for _ in range(2)]
    x = p.leaf("x", TwoTensor(*parts).requires_grad_())
    for _ in range(2):
        y = x.tanh()
        y.register_hook(p.hook("y"))
        with p.backward():
            (y * x).sum().backward()
        p.event("inner", type(_grad(x).a).__name__)


@scenario(tags=("subclass", "accumulation", "identity"))
def subclass_gradient_is_added_to(p: Probe) -> None:
    """The second gradient of a subclass parameter is added in place to the first, which keeps its class."""
    x = p.leaf("x", nn.Parameter(TwoTensor(p.randn(2, 3), p.randn(2, 3))))
    p.event("parameter", isinstance(x, nn.Parameter))
    with p.backward():
        (x * x).sum().backward()
        first = x.grad
        x.sin().sum().backward()
    p.event("same", x.grad is first, type(x.grad).__name__)


@scenario(tags=("subclass", "accumulation"))
def classes_change_under_one_leaf(p: Probe) -> None:
    """A plain leaf gets a subclass gradient, then a plain one on top of it, and the other way round."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    other = TwoTensor(p.randn(3), p.randn(3))
    for factor in (other, p.randn(3), other):
        with p.backward():
            (w.sin() * factor).sum().backward()
        p.event("class", type(w.grad).__name__)
    w.grad = None
    for factor in (p.randn(3), other):
        with p.backward():
            (w.cos() * factor).sum().backward()
        p.event("class", type(w.grad).__name__)


@scenario(tags=("subclass",))
def cotangents_of_either_class(p: Probe) -> None:
    """One program is given plain and subclass cotangents in turn."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    w = p.leaf("w", p.randn(3, requires_grad=True))
    for cotangent in (p.randn(3), TwoTensor(p.randn(3), p.randn(3)), p.randn(3)):
        with p.backward():
            (x.sin() * 2).backward(cotangent)
            w.exp().backward(cotangent)
        p.event("class", type(x.grad).__name__, type(w.grad).__name__)
        x.grad = w.grad = None


@scenario(tags=("subclass", "hooks"))
def hook_gives_a_subclass(p: Probe) -> None:
    """A hook may put a subclass in the place of a plain gradient; what comes after works on the subclass."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    y = w.sin()
    z = y * 2
    z.register_hook(p.hook("z", lambda g: TwoTensor(g, g * 10)))
    y.register_hook(p.hook("y"))
    with p.backward():
        z.exp().sum().backward()
    p.event("class", type(w.grad).__name__)


@scenario(tags=("subclass", "hooks"))
def hook_gives_a_plain_gradient(p: Probe) -> None:
    """A hook may put a plain gradient in the place of a subclass."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    y = x.sin()
    y.register_hook(p.hook("y", lambda g: g.a + g.b))
    x.register_hook(p.hook("x"))
    with p.backward():
        (y * 3).sum().backward()
    p.event("class", type(x.grad).__name__)


@scenario(tags=("subclass", "hooks", "identity"))
def one_subclass_gradient_in_two_hooks(p: Probe) -> None:
    """The gradient of a sum reaches both summands as one object, also if it is a subclass."""
    seen: list[Tensor] = []
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    y = p.leaf("y", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    a, b = x.clone(), y.clone()
    for name, tensor in (("a", a), ("b", b)):
        tensor.register_hook(p.hook(name, lambda g: seen.append(g)))
    with p.backward():
        ((a + b) * 2).sum().backward()
    p.event("one object", seen[0] is seen[1])
    p.event("shared", x.grad is y.grad, _grad(x).a.data_ptr() == _grad(y).a.data_ptr())


@scenario(tags=("subclass", "in-place"))
def view_of_a_subclass_in_place(p: Probe) -> None:
    """An in-place operation on a view of a subclass tensor."""
    x = p.leaf("x", TwoTensor(p.randn(3, 2), p.randn(3, 2)).requires_grad_())
    y = x.clone()
    y[0].mul_(3)
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("subclass", "shapes"))
def subclass_of_changing_size(p: Probe) -> None:
    """Subclass tensors whose sizes change from step to step, with plain parameters and sizes 0 and 1."""
    w = p.leaf("w", p.randn(3, 2, requires_grad=True))
    for rows in (4, 5, 6, 1, 0, 7):
        x = TwoTensor(p.randn(rows, 3), p.randn(rows, 3)).requires_grad_()
        with p.backward():
            (x @ w).tanh().sum().backward()
        p.value(f"grad{rows}", x.grad)


@scenario(tags=("subclass", "higher-order"))
def subclass_differentiated_twice(p: Probe) -> None:
    """A gradient of a subclass leaf can be differentiated again."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    with p.backward():
        (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        p.event("first", type(first).__name__, first.requires_grad)
        (first * first).sum().backward()


@scenario(tags=("subclass", "identity"))
def two_wrappers_of_one_tensor(p: Probe) -> None:
    """Two subclass tensors that share an inner tensor, one of them used together with that tensor."""
    shared = p.randn(3)
    x = p.leaf("x", TwoTensor(shared, p.randn(3)).requires_grad_())
    y = p.leaf("y", TwoTensor(p.randn(3), shared).requires_grad_())
    for _ in range(2):
        with p.backward():
            (x * y * shared).sin().sum().backward()


class Ensemble(torch.autograd.Function):
    """A Function on subclass tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@scenario(tags=("subclass", "function"))
def function_on_subclass_tensors(p: Probe) -> None:
    """A custom Function between two parts that can be compiled sees and returns subclass tensors."""
    x = p.leaf("x", TwoTensor(p.randn(3), p.randn(3)).requires_grad_())
    for _ in range(2):
        with p.backward():
            Ensemble.apply(x.sin()).exp().sum().backward()


@scenario(tags=("subclass",))
def gradients_of_subclass_intermediates(p: Probe) -> None:
    """`autograd.grad` for a subclass leaf, an intermediate and a plain leaf at once."""
    x = TwoTensor(p.randn(3), p.randn(3)).requires_grad_()
    w = p.randn(3, requires_grad=True)
    y = x.sin() * w
    with p.backward():
        grads = torch.autograd.grad(y.exp().sum(), [x, y, w], retain_graph=True)
    for name, grad in zip(("x", "y", "w"), grads, strict=True):
        p.value(name, grad)
