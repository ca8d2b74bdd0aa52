"""Saved tensors that only their own node can unpack, and graphs of which a part must stay intact.

Checked here: how often and when pack and unpack hooks run around Functions, second derivatives through them,
and what can still be differentiated after a gradient of an intermediate tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


class ScaledProduct(torch.autograd.Function):
    """x * y * scale, differentiable twice; records what it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float, p: Probe, name: str) -> Tensor:
        ctx.scale, ctx.probe, ctx.name_of_it = scale, p, name
        ctx.save_for_backward(x, y)
        return x * y * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.probe.event(f"backward {ctx.name_of_it}")
        x, y = ctx.saved_tensors
        ctx.probe.event(f"read {ctx.name_of_it}", x.requires_grad, y.requires_grad, x.is_leaf, y.is_leaf)
        return grads[0] * y * ctx.scale, grads[0] * x * ctx.scale, None, None, None


def _offload(p: Probe) -> saved_tensors_hooks:
    """Hooks that number what they pack, and record each call."""
    count = 0

    def pack(t: Tensor) -> tuple[int, Tensor]:
        nonlocal count
        count += 1
        p.event("pack", count)
        return count, t.detach().clone()

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        p.event("unpack", packed[0])
        return packed[1]

    return saved_tensors_hooks(pack, unpack)


def _state(root: Tensor, source: Tensor) -> str:
    """Whether the graph between two tensors was freed."""
    try:
        torch.autograd.grad(root, source, torch.ones_like(root), retain_graph=True)
    except RuntimeError as error:
        return "freed" if "second time" in str(error) else str(error)
    return "intact"


@scenario(tags=("saved-tensors", "function"))
def functions_behind_offloading_hooks(p: Probe) -> None:
    """A Function's saved tensors come back when it reads them, those of built-in nodes when they start."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    w = p.leaf("w", p.randn(4, requires_grad=True))
    with _offload(p):
        a = ScaledProduct.apply(x, w, 2.0, p, "first")
        b = a.sin() * w
        c = ScaledProduct.apply(b, a, 0.5, p, "second")
    a.register_hook(p.hook("a"))
    b.register_hook(p.hook("b"))
    with p.backward():
        c.sum().backward()


@scenario(tags=("saved-tensors", "function", "lifetime"))
def what_a_function_behind_hooks_frees(p: Probe) -> None:
    """After a backward everything that ran has been freed, with hooks or without."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    a = x.exp()
    with _offload(p):
        b = ScaledProduct.apply(a, x, 2.0, p, "it")
    c = b.sin()
    with p.backward():
        c.sum().backward()
    p.event("state", _state(c, b), _state(b, a), _state(a, x))


@scenario(tags=("saved-tensors", "function"))
def function_behind_hooks_in_many_steps(p: Probe) -> None:
    """Steps of a training loop with offloading: the hooks run in each step as in the first."""
    w = p.leaf("w", p.randn(4, requires_grad=True))
    for step in range(3):
        x = p.randn(4)
        with _offload(p):
            y = ScaledProduct.apply(x, w, 1.0 + step, p, f"step {step}").tanh()
        with p.backward():
            y.sum().backward()


@scenario(tags=("saved-tensors", "function", "retain-graph"))
def function_behind_hooks_retained_then_freed(p: Probe) -> None:
    """A retained graph is unpacked again in the second backward, which frees it."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    with _offload(p):
        y = ScaledProduct.apply(x, x.sin(), 1.5, p, "it")
    with p.backward():
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    p.event("state", _state(y, x))


@scenario(tags=("saved-tensors", "checkpoint"))
def checkpoint_with_offloading_hooks_inside(p: Probe) -> None:
    """Hooks inside a recomputed region pack in the forward and once more in the recomputation."""
    m = p.module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def region(h: Tensor) -> Tensor:
        p.event("region")
        with _offload(p):
            h = m(h)
        return h.sin()

    for reentrant in (False, True):
        with p.backward():
            checkpoint(region, x, use_reentrant=reentrant).sum().backward()


@scenario(tags=("saved-tensors", "checkpoint", "function"))
def checkpoint_of_a_function_offloaded(p: Probe) -> None:
    """A Function inside a non-reentrant checkpoint inside `save_on_cpu` is recomputed when it reads."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def region(h: Tensor) -> Tensor:
        p.event("region")
        return ScaledProduct.apply(h.sin(), h, 2.0, p, "inside").exp()

    with save_on_cpu():
        y = checkpoint(region, x * 2, use_reentrant=False)
        z = ScaledProduct.apply(y, x, 0.5, p, "outside")
    with p.backward():
        z.sum().backward()


@scenario(tags=("saved-tensors", "higher-order"))
def gradient_penalty_through_offloading_hooks(p: Probe) -> None:
    """Unpacked tensors have the history that they were saved with, so second derivatives are whole."""
    m = p.module(nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 1)))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with _offload(p):
        score = m(x).sum()
    with p.backward():
        (grad,) = torch.autograd.grad(score, x, create_graph=True)
        p.event("first derivative", grad)
        ((grad.norm(2, dim=1) - 1) ** 2).mean().backward()


@scenario(tags=("saved-tensors", "higher-order", "function"))
def second_derivative_of_a_function_behind_hooks(p: Probe) -> None:
    """A Function reads tensors with history, also where hooks packed them away."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    w = p.leaf("w", p.randn(4, requires_grad=True))
    with _offload(p):
        y = ScaledProduct.apply(x.sin(), w, 2.0, p, "it")
    with p.backward():
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (grad * grad).sum().backward()


@scenario(tags=("saved-tensors", "higher-order", "checkpoint"))
def gradient_penalty_through_checkpoints(p: Probe) -> None:
    """A penalty on the gradient of a checkpointed network, whose region is recomputed for it."""
    m = p.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def region(h: Tensor) -> Tensor:
        p.event("region")
        return m(h)

    y = checkpoint(region, x, use_reentrant=False)
    with p.backward():
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + grad.pow(2).sum()).backward()


@scenario(tags=("inputs", "lifetime"))
def second_differentiation_below_an_intermediate(p: Probe) -> None:
    """`autograd.grad` for an intermediate frees what is above it; below, the graph can be used still."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    a = x.sin()
    b = a.exp() * a
    c = b.cos() * b
    with p.backward():
        (grad,) = torch.autograd.grad(c.sum(), b)
    p.event("state", _state(c, b), _state(b, a), _state(a, x))
    with p.backward():
        b.backward(grad)
    p.event("state", _state(b, a), _state(a, x))


@scenario(tags=("inputs", "lifetime"))
def intermediate_above_another_input(p: Probe) -> None:
    """Of two intermediate inputs, the upper one's node is executed and freed, the lower one's is not."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    a = x.sin()
    b = a.exp()
    with p.backward():
        p.value("grads", torch.autograd.grad((b * b + a).sum(), (b, a)))
    p.event("state", _state(b, a), _state(a, x))


@scenario(tags=("inputs", "function", "lifetime"))
def intermediate_made_by_a_function_behind_hooks(p: Probe) -> None:
    """A Function that is not executed keeps its saved tensors, packed, for a later backward."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    with _offload(p):
        a = ScaledProduct.apply(x, x.sin(), 2.0, p, "lower")
        b = ScaledProduct.apply(a, x, 0.5, p, "upper")
    with p.backward():
        (grad,) = torch.autograd.grad(b.sum(), a)
        a.backward(grad)


@scenario(tags=("inputs", "hooks"))
def grad_cam_twice(p: Probe) -> None:
    """Grad-CAM: activations and their gradient for two classes, then an ordinary step on the same graph."""
    m = p.module(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.ReLU()))
    head = p.module(nn.Linear(2, 3), "head")
    x = p.randn(2, 1, 8, 8)
    activations = m(x)
    activations.register_hook(p.hook("activations"))
    scores = head(activations.mean((2, 3)))
    with p.backward():
        for label in (0, 2):
            (grad,) = torch.autograd.grad(scores[:, label].sum(), activations, retain_graph=True)
            cam = (grad.mean((2, 3), keepdim=True) * activations.detach()).sum(1).relu()
            p.value(f"cam {label}", cam)
        scores.square().mean().backward()


@scenario(tags=("inputs", "accumulate"))
def backward_into_an_intermediate_then_below(p: Probe) -> None:
    """`backward(inputs=[intermediate])` executes that tensor's node too: only what is below stays whole."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    a = x.sin()
    b = a.exp()
    c = b * b
    with p.backward():
        c.sum().backward(inputs=[b])
    p.value("grad of b", b.grad)
    p.event("state", _state(c, b), _state(b, a), _state(a, x))
