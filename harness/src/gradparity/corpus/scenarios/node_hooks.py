"""Hooks on autograd nodes: before and after a node, on AccumulateGrad, and on nodes with several outputs.

In: a probe. Out: which gradients the hooks see, in which order, and what their results change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("hooks", "node"))
def every_hook_of_one_node(p: Probe) -> None:
    """Around one node eager calls tensor hooks, then pre hooks, then the node, then post hooks."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node_of(y).register_hook(p.hook("post1", kind="node_post"))
    node_of(y).register_prehook(p.hook("pre1", kind="node_pre"))
    y.register_hook(p.hook("tensor1"))
    node_of(y).register_prehook(p.hook("pre2", kind="node_pre"))
    y.register_hook(p.hook("tensor2"))
    node_of(y).register_hook(p.hook("post2", kind="node_post"))
    y.retain_grad()
    with p.backward():
        y.exp().sum().backward()
    p.value("y.grad", y.grad)


@scenario(tags=("hooks", "node"))
def pre_hook_changes_the_gradient(p: Probe) -> None:
    """The tuple that a pre hook returns is what the next pre hook and the node itself get."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node_of(y).register_prehook(p.hook("scale", lambda grads: (grads[0] * 2,), kind="node_pre"))
    node_of(y).register_prehook(p.hook("seen", kind="node_pre"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "node"))
def post_hook_changes_the_gradients(p: Probe) -> None:
    """The tuple that a post hook returns replaces the gradients for the node's inputs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product = x * y

    def swap(grad_inputs: tuple[Tensor, ...], grad_outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return grad_inputs[1], grad_inputs[0] * 2

    node_of(product).register_hook(p.hook("swap", swap, kind="node_post"))
    node_of(product).register_hook(p.hook("seen", kind="node_post"))
    with p.backward():
        product.sum().backward()


@scenario(tags=("hooks", "node", "undefined"))
def post_hook_returns_none_for_one_input(p: Probe) -> None:
    """A post hook may stop the gradient of one input by returning None for it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product = x.sin() * y
    node_of(product).register_hook(p.hook("stop", lambda gi, go: (None, gi[1]), kind="node_post"))
    with p.backward():
        product.sum().backward()


@scenario(tags=("hooks", "node", "undefined"))
def pre_hook_returns_none(p: Probe) -> None:
    """A pre hook may turn the gradient of its node into None, which then runs through the rest."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node_of(y).register_prehook(p.hook("stop", lambda grads: (None,), kind="node_pre"))
    node_of(y).register_hook(p.hook("post", kind="node_post"))
    with p.backward():
        (y.exp() + x).sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def pre_hook_returns_too_many(p: Probe) -> None:
    """A pre hook that returns another number of gradients than it got is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    node_of(y).register_prehook(p.hook("y", lambda grads: (grads[0], grads[0]), kind="node_pre"))
    with p.backward():
        y.sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def post_hook_returns_too_few(p: Probe) -> None:
    """A post hook that returns fewer gradients than the node has inputs is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    product = x * y
    node_of(product).register_hook(p.hook("product", lambda gi, go: gi[:1], kind="node_post"))
    with p.backward():
        product.sum().backward()


@scenario(tags=("hooks", "node", "errors"))
def node_hook_raises(p: Probe) -> None:
    """An exception in a post hook leaves what was accumulated before it, and nothing after it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    inner = x.sin()

    def refuse(grad_inputs: Any, grad_outputs: Any) -> None:
        raise LookupError("refused")

    node_of(inner).register_hook(p.hook("inner", refuse, kind="node_post"))
    with p.backward():
        (inner * y).sum().backward()


@scenario(tags=("hooks", "node", "accumulate"), issue="pytorch#138538")
def accumulate_node_hooks_like_ddp(p: Probe) -> None:
    """Post hooks on the AccumulateGrad nodes, as DDP sets them, run from the last layer to the first."""
    layers = [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)]
    model = p.module(nn.Sequential(*layers))
    nodes = {name: node_of(param) for name, param in model.named_parameters()}
    for name, node in nodes.items():
        node.register_hook(p.hook(name, kind="node_post"))
    with p.backward():
        model(p.randn(2, 3)).sum().backward()


@scenario(tags=("hooks", "node", "accumulate"))
def accumulate_node_hook_sees_the_grad(p: Probe) -> None:
    """Before AccumulateGrad runs, `.grad` is still None; in its post hook it is written."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    node = node_of(x)

    def look(site: str) -> Any:
        return lambda *args: p.event(site, x.grad is None)

    node.register_prehook(p.hook("pre", look("pre.grad_is_none"), kind="node_pre"))
    node.register_hook(p.hook("post", look("post.grad_is_none"), kind="node_post"))
    x.register_hook(p.hook("tensor", look("tensor.grad_is_none")))
    x.register_post_accumulate_grad_hook(p.hook("acc", look("acc.grad_is_none"), kind="post_acc"))
    with p.backward():
        x.sin().sum().backward()


@scenario(tags=("hooks", "node", "accumulate"))
def accumulate_node_pre_hook_scales(p: Probe) -> None:
    """A pre hook on AccumulateGrad changes what is added to `.grad`, like a tensor hook on the leaf."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    node = node_of(x)
    node.register_prehook(p.hook("pre", lambda grads: (grads[0] * 10,), kind="node_pre"))
    with p.backward():
        x.sin().sum().backward()
        x.cos().sum().backward()


@scenario(tags=("hooks", "node", "undefined"))
def unbind_with_unused_outputs(p: Probe) -> None:
    """Hooks of a node with several outputs see None for each output that nobody used."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    rows = x.exp().unbind(0)
    node_of(rows[0]).register_prehook(p.hook("pre", kind="node_pre"))
    node_of(rows[0]).register_hook(p.hook("post", kind="node_post"))
    with p.backward():
        rows[1].sum().backward()


@scenario(tags=("hooks", "node"))
def split_with_hooks_on_node_and_outputs(p: Probe) -> None:
    """On a split, the hooks of all outputs run before the pre hook of their common node."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    parts = x.sin().split(2)
    for i, part in enumerate(parts):
        part.register_hook(p.hook(f"part{i}"))
    scale = p.hook("pre", lambda grads: tuple(g * 2 for g in grads), kind="node_pre")
    node_of(parts[0]).register_prehook(scale)
    with p.backward():
        (parts[2] * parts[0].exp() + parts[1]).sum().backward()


@scenario(tags=("hooks", "node"))
def node_hook_removed_between_backwards(p: Probe) -> None:
    """A node hook that is removed between two backwards over one graph runs only in the first."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    handle = node_of(y).register_hook(p.hook("removed", lambda gi, go: (gi[0] * 2,), kind="node_post"))
    node_of(y).register_prehook(p.hook("kept", kind="node_pre"))
    with p.backward():
        y.sum().backward(retain_graph=True)
        handle.remove()
        y.sum().backward()


@scenario(tags=("hooks", "node"))
def node_hook_registered_during_backward(p: Probe) -> None:
    """Hooks put on a node that has not run yet are called in the same backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    z = y.exp()

    def add_hooks(grad: Tensor) -> None:
        node_of(y).register_prehook(p.hook("late.pre", kind="node_pre"))
        node_of(y).register_hook(p.hook("late.post", lambda gi, go: (gi[0] + 1,), kind="node_post"))

    z.register_hook(p.hook("z", add_hooks))
    with p.backward():
        z.sum().backward()


class Scale(torch.autograd.Function):
    """Multiply by a Python number."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@scenario(tags=("hooks", "node", "function"))
def hooks_on_the_node_of_a_function(p: Probe) -> None:
    """The node of a custom Function takes the same hooks as others; non-tensor inputs do not count."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = Scale.apply(x.sin(), 3.0)
    node_of(y).register_prehook(p.hook("pre", kind="node_pre"))
    node_of(y).register_hook(p.hook("post", kind="node_post"))
    y.register_hook(p.hook("tensor"))
    with p.backward():
        y.sum().backward()
