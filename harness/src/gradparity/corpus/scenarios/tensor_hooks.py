"""Hooks on tensors: what they see, what they may return, and what they may do to other hooks.

In: a probe. Out: order, number and payload of hook calls, and the gradients after the hooks had their say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("hooks",))
def several_hooks_on_one_tensor(p: Probe) -> None:
    """Hooks of one tensor run in the order of registration, each on the result of the one before."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("first", lambda g: g * 2))
    y.register_hook(p.hook("second"))
    y.register_hook(p.hook("third", lambda g: g + 1))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks",))
def hook_returns_a_new_gradient(p: Probe) -> None:
    """The gradient that a hook returns replaces the one that it was given."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.register_hook(p.hook("y", lambda g: torch.full_like(g, 0.5)))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "aliasing"))
def hook_changes_the_gradient_in_place(p: Probe) -> None:
    """A hook that changes its gradient in place and returns None still changes what flows on."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def halve(grad: Tensor) -> None:
        grad.mul_(0.5)

    y.register_hook(p.hook("y", halve))
    with p.backward():
        y.pow(2).sum().backward()


@scenario(tags=("hooks", "aliasing"))
def in_place_hook_is_seen_by_the_other_branch(p: Probe) -> None:
    """An addition gives one gradient tensor to both sides; an in-place hook on one shows on the other."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    left, right = x.sin(), x.cos()

    def double(grad: Tensor) -> None:
        grad.mul_(2)

    right.register_hook(p.hook("right", double))
    left.register_hook(p.hook("left"))
    with p.backward():
        ((left + right) * p.tensor([1.0, 2.0, 3.0])).sum().backward()


@scenario(tags=("hooks",))
def hook_removes_itself(p: Probe) -> None:
    """A hook that removes itself while it runs is not called in the second backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    handle = y.register_hook(p.hook("once", lambda g: handle.remove()))
    y.register_hook(p.hook("always"))
    with p.backward():
        y.sum().backward(retain_graph=True)
        y.sum().backward()


@scenario(tags=("hooks",))
def hook_removes_the_next_hook_of_its_tensor(p: Probe) -> None:
    """Eager collects a tensor's hooks before it calls the first: a removal in between comes too late."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("first", lambda g: second.remove()))
    second = y.register_hook(p.hook("second", lambda g: g * 3))
    with p.backward():
        y.sum().backward(retain_graph=True)
        y.sum().backward()


@scenario(tags=("hooks",))
def hook_removes_an_upstream_hook(p: Probe) -> None:
    """A hook that is removed before the backward reaches its tensor is not called any more."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()
    upstream = y.register_hook(p.hook("upstream", lambda g: g * 100))
    z.register_hook(p.hook("z", lambda g: upstream.remove()))
    with p.backward():
        z.sum().backward()


@scenario(tags=("hooks",))
def hook_registers_upstream(p: Probe) -> None:
    """A hook registered during the backward on a tensor that is still to come runs in this backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()

    def add_hook(grad: Tensor) -> None:
        y.register_hook(p.hook("late", lambda g: g * 2))

    z.register_hook(p.hook("z", add_hook))
    with p.backward():
        z.sum().backward()


@scenario(tags=("hooks",))
def hook_registers_on_a_leaf(p: Probe) -> None:
    """A hook registered during the backward on a leaf runs before that leaf is accumulated."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def add_hook(grad: Tensor) -> None:
        x.register_hook(p.hook("late", lambda g: g * 2))

    y.register_hook(p.hook("y", add_hook))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks",))
def hook_registers_on_its_own_tensor(p: Probe) -> None:
    """A hook that a tensor gets from its own hook runs only from the next backward on."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def add_hook(grad: Tensor) -> None:
        y.register_hook(p.hook("late"))

    y.register_hook(p.hook("y", add_hook))
    with p.backward():
        y.sum().backward(retain_graph=True)
        y.sum().backward()


@scenario(tags=("hooks", "errors"))
def hook_raises(p: Probe) -> None:
    """The exception of a hook comes out of backward with its type; what was accumulated before stays."""
    late = p.leaf("late", p.randn(3, requires_grad=True))
    early = p.leaf("early", p.randn(3, requires_grad=True))
    y = late.sin()

    def refuse(grad: Tensor) -> None:
        raise KeyError("refused")

    y.register_hook(p.hook("y", refuse))
    with p.backward():
        (y * early).sum().backward()


@scenario(tags=("hooks", "retain-graph"))
def hook_raises_and_backward_runs_again(p: Probe) -> None:
    """After a hook has raised in a retained backward, the same graph can be differentiated again."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def refuse(grad: Tensor) -> None:
        raise KeyError("refused")

    handle = y.register_hook(p.hook("y", refuse))
    with p.backward():
        try:
            y.sum().backward(retain_graph=True)
        except KeyError:
            p.event("caught")
        handle.remove()
        y.sum().backward()


@scenario(tags=("hooks", "visibility"), issue="pytorch#109774")
def hook_reads_the_grad_of_another_leaf(p: Probe) -> None:
    """A hook sees the `.grad` of leaves that were accumulated before it, and None for those to come."""
    near = p.leaf("near", p.randn(3, requires_grad=True))
    far = p.leaf("far", p.randn(3, requires_grad=True))
    y = far.sin()
    y.register_hook(p.hook("y", lambda g: p.event("seen", near.grad, far.grad)))
    with p.backward():
        (y * near).sum().backward()


@scenario(tags=("hooks",))
def hooks_on_a_leaf(p: Probe) -> None:
    """Hooks of a leaf run once, on the sum of all of its gradients, before `.grad` is written."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("negate", lambda g: -g))
    x.register_hook(p.hook("check", lambda g: p.event("grad_is_none", x.grad is None)))
    with p.backward():
        (x.sin() + x * x).sum().backward()


@scenario(tags=("hooks",))
def hook_on_an_unused_branch(p: Probe) -> None:
    """The hook of a tensor that the loss does not depend on is never called."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    unused = x.cos()
    unused.register_hook(p.hook("unused"))
    with p.backward():
        x.sin().sum().backward()


class OnlyFirst(torch.autograd.Function):
    """Multiply two tensors, with a gradient for the first one only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        return grad * 2, None


@scenario(tags=("hooks", "undefined"))
def none_gradient_to_a_hooked_leaf(p: Probe) -> None:
    """Hooks of a leaf whose only gradient is None are called with None."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    for name, leaf in (("x", x), ("y", y)):
        leaf.register_hook(p.hook(name))
        leaf.register_post_accumulate_grad_hook(p.hook(f"{name}.acc", kind="post_acc"))
    with p.backward():
        OnlyFirst.apply(x, y).sum().backward()


@scenario(tags=("hooks", "undefined"))
def none_gradient_to_a_hooked_intermediate(p: Probe) -> None:
    """A None gradient runs on through hooks and nodes down to the leaf, which keeps no `.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    inner = y.sin()
    inner.register_hook(p.hook("inner"))
    with p.backward():
        OnlyFirst.apply(x, inner).sum().backward()
