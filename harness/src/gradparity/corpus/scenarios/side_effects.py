"""Hooks that change the world while the backward is under way.

In: a probe. Out: gradients and errors that depend on when each node, hook and accumulation really runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("side-effects", "accumulation"))
def hook_sets_the_grad_of_a_leaf(p: Probe) -> None:
    """A hook gives a leaf a `.grad` before it is accumulated: the gradient is added to it in place."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    given = p.tensor([10.0, 20.0, 30.0])
    y = x.sin()

    def set_grad(grad: Tensor) -> None:
        x.grad = given

    y.register_hook(p.hook("y", set_grad))
    with p.backward():
        y.exp().sum().backward()
    p.event("same_object", x.grad is given)


@scenario(tags=("side-effects", "accumulation"))
def hook_drops_the_grad_of_a_leaf(p: Probe) -> None:
    """A hook takes away the `.grad` of a leaf before it is accumulated: accumulation starts from nothing."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.grad = p.tensor([10.0, 20.0, 30.0])
    y = x.sin()

    def drop_grad(grad: Tensor) -> None:
        x.grad = None

    y.register_hook(p.hook("y", drop_grad))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("side-effects", "islands"))
def hook_freezes_a_leaf(p: Probe) -> None:
    """A hook that freezes a leaf which is still to come keeps it from being accumulated."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    y = x.sin()
    y.register_hook(p.hook("y", lambda g: p.event("requires_grad", x.requires_grad_(False).requires_grad)))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("side-effects", "in-place", "errors"))
def hook_changes_a_saved_tensor(p: Probe) -> None:
    """A hook that changes a tensor which a later node has saved makes that node a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    near = p.leaf("near", p.randn(3, requires_grad=True))
    constant = p.randn(3)
    y = x.sin() * constant
    z = y.exp() * near
    y.register_hook(p.hook("y", lambda g: p.event("sum", float(constant.zero_().sum()))))
    with p.backward():
        z.sum().backward()


@scenario(tags=("side-effects", "in-place"))
def hook_changes_a_saved_tensor_unseen(p: Probe) -> None:
    """A hook that changes a saved tensor through `.data` changes what the later node computes."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    constant = p.randn(3)
    y = x.sin() * constant

    def change(grad: Tensor) -> None:
        constant.data.mul_(100)

    y.register_hook(p.hook("y", change))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("side-effects", "in-place", "errors"))
def step_in_a_hook_that_comes_too_early(p: Probe) -> None:
    """An optimizer step in a hook on a weight that an earlier layer still needs is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)

    w.register_post_accumulate_grad_hook(p.hook("w", step, kind="post_acc"))
    with p.backward():
        ((x * w.detach()).sin() * w).sum().backward()


@scenario(tags=("side-effects", "random"), fp64=False)
def hooks_that_draw_random_numbers(p: Probe) -> None:
    """Noise that hooks add comes from the generator in the order in which the hooks run."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    left = x.sin()
    right = x.cos()
    left_end = left.exp()
    for name, tensor in (("left", left), ("right", right), ("left_end", left_end)):
        tensor.register_hook(p.hook(name, lambda g: g + torch.randn(3).to(g)))
    with p.backward():
        (right * left_end).sum().backward()
    p.value("next", torch.randn(2))


@scenario(tags=("side-effects", "hooks"))
def hook_removes_upstream_hooks_of_all_kinds(p: Probe) -> None:
    """Node, leaf and accumulate hooks that are removed before their turn are not called."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()
    handles = [
        node_of(y).register_prehook(p.hook("y.pre", kind="node_pre")),
        node_of(y).register_hook(p.hook("y.post", kind="node_post")),
        x.register_hook(p.hook("x")),
        x.register_post_accumulate_grad_hook(p.hook("x.acc", kind="post_acc")),
    ]
    z.register_hook(p.hook("z", lambda g: [handle.remove() for handle in handles] and None))
    with p.backward():
        z.sum().backward(retain_graph=True)
        z.sum().backward()


@scenario(tags=("side-effects", "errors"))
def hook_raises_a_base_exception(p: Probe) -> None:
    """An exception that is no `Exception`, such as SystemExit, comes out of backward as it is."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def leave(grad: Tensor) -> None:
        raise SystemExit(3)

    y.register_hook(p.hook("y", leave))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("side-effects", "hooks"))
def weights_freed_after_forward_and_refilled(p: Probe) -> None:
    """As sharded training does: storage is freed after forward, and hooks refill it before it is needed."""
    model: Any = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    full = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    sizes = [layer.weight.untyped_storage().size() for layer in (model[0], model[2])]

    def refill(i: int) -> None:
        weight = model[2 * i].weight
        weight.untyped_storage().resize_(sizes[i])
        with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
            weight.copy_(full[i])

    hidden = model[1](model[0](x))
    out = model[2](hidden)
    for i, tensor in ((0, hidden), (1, out)):
        tensor.register_hook(p.hook(f"refill{i}", lambda g, i=i: refill(i)))
        model[2 * i].weight.untyped_storage().resize_(0)
    with p.backward():
        out.pow(2).sum().backward()


@scenario(tags=("side-effects", "in-place"))
def parameter_data_replaced_before_backward(p: Probe) -> None:
    """A parameter whose `.data` was replaced after forward: the saved tensor is still the old one."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = x.sin() * w
    w.data = p.randn(3)
    with p.backward():
        out.sum().backward()


class ClearsGradient(torch.autograd.Function):
    """A positive part whose backward writes zeros into the gradient that it was given."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad[x < 0] = 0
        return grad


@scenario(tags=("side-effects", "function", "aliasing"))
def function_changes_its_gradient_in_place(p: Probe) -> None:
    """A backward that writes into its gradient changes it for the other branch of an addition too."""
    x = p.leaf("x", p.tensor([0.5, -1.0, 2.0, -0.1], requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    other = y.sin()
    other.register_hook(p.hook("other"))
    with p.backward():
        ((other + ClearsGradient.apply(x)) * p.randn(4)).sum().backward()


@scenario(tags=("side-effects", "higher-order"))
def second_pass_outside_the_context(p: Probe) -> None:
    """A gradient that was computed inside the context is differentiated again outside of it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = (x.exp() * x).sum()
    with p.backward():
        (first,) = torch.autograd.grad(y, x, create_graph=True)
    first.register_hook(p.hook("first"))
    first.pow(2).sum().backward()


@scenario(tags=("side-effects",))
def contexts_inside_one_another(p: Probe) -> None:
    """A context inside a context, and forward code in both, change nothing."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        y = x.sin()
        y.register_hook(p.hook("y"))
        with p.backward():
            y.exp().sum().backward(retain_graph=True)
        y.sum().backward()
