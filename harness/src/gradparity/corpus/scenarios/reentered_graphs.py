"""User code that differentiates through nodes which the running backward comes to later.

Checked here: an equilibrium is solved so, by a hook; and so do Functions that close over a part of the graph.
The backward that is running is not told to retain its graph: eager releases each node when it has run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

STEPS = 3


def _grad(output: Tensor, given: Tensor, cotangent: Tensor | None = None) -> Tensor:
    (grad,) = torch.autograd.grad(output, given, cotangent, retain_graph=True)
    return grad


@scenario(tags=("reentrant", "hooks"))
def hook_solves_an_equilibrium(p: Probe) -> None:
    """The cotangent of an equilibrium is a fixed point, found by one `autograd.grad` after the other."""
    weight = p.leaf("weight", p.randn(3, 3, requires_grad=True))
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for _ in range(STEPS):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = torch.tanh(0.2 * weight @ z + x)
        start = z.clone().requires_grad_()
        z = torch.tanh(0.2 * weight @ start + x)
        handles: list[Any] = []

        def solve(grad: Tensor, z: Tensor = z, start: Tensor = start, handles: list[Any] = handles) -> Tensor:
            handles.pop().remove()
            found = grad
            for _ in range(4):
                found = _grad(z, start, found) + grad
            return found

        handles.append(z.register_hook(p.hook("z", solve)))
        with p.backward():
            z.square().sum().backward()


def _through(p: Probe, register: Callable[[Any, Callable[[Tensor], Tensor]], Any]) -> None:
    """Steps in which a hook that `register` sets differentiates the lower half of the graph."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for _ in range(STEPS):
        h = x.sin() * x
        z = h.exp()

        def hook(grad: Tensor, h: Tensor = h) -> Tensor:
            return _grad(h, x, grad) + grad

        register(z, hook)
        with p.backward():
            z.sum().backward()


@scenario(tags=("reentrant", "hooks"))
def tensor_hook_differentiates_the_nodes_below(p: Probe) -> None:
    """A tensor hook returns what the rest of the backward would make of its gradient."""
    _through(p, lambda z, hook: z.register_hook(p.hook("z", hook)))


@scenario(tags=("reentrant", "hooks"))
def node_prehook_differentiates_the_nodes_below(p: Probe) -> None:
    """The same, by a hook before a node."""
    _through(p, lambda z, hook: z.grad_fn.register_prehook(lambda grads: (hook(grads[0]),)))


@scenario(tags=("reentrant", "hooks"))
def node_hook_differentiates_the_nodes_below(p: Probe) -> None:
    """The same, by a hook behind a node."""
    _through(p, lambda z, hook: z.grad_fn.register_hook(lambda inputs, grads: (hook(inputs[0]),)))


@scenario(tags=("reentrant", "hooks"))
def hook_differentiates_another_output(p: Probe) -> None:
    """A hook differentiates a second loss, which shares the lower half of the graph."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(STEPS):
        h = x.sin()
        other = (h * x).cos().sum()
        z = h.exp()

        def look(grad: Tensor, other: Tensor = other, step: int = step) -> None:
            p.value(f"other{step}", _grad(other, x))

        z.register_hook(look)
        with p.backward():
            z.sum().backward()


@scenario(tags=("reentrant", "hooks"))
def hook_in_a_backward_for_inputs_differentiates_the_nodes_below(p: Probe) -> None:
    """The same, where the outer backward is `autograd.grad`."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(STEPS):
        h = x.sin()
        z = h.exp()
        z.register_hook(lambda grad, h=h: _grad(h, x, grad) + grad)
        with p.backward():
            p.value(f"grad{step}", torch.autograd.grad(z.sum(), x)[0])


@scenario(tags=("reentrant", "hooks", "modules"))
def module_hook_differentiates_the_nodes_below(p: Probe) -> None:
    """A full backward hook of a module differentiates the layer before it."""
    first, second = p.module(nn.Linear(3, 3)), nn.Tanh()
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    before: list[Tensor] = []
    second.register_full_backward_hook(
        lambda module, inputs, outputs: (_grad(before[-1], x, inputs[0]) + inputs[0],)
    )
    for _ in range(STEPS):
        before.append(first(x))
        with p.backward():
            second(before[-1]).sum().backward()


@scenario(tags=("reentrant", "hooks"))
def hook_differentiates_where_others_did_not(p: Probe) -> None:
    """Graphs of one structure: in every second one, the hook differentiates the lower half."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(2 * STEPS):
        h = x.sin() * x
        z = h.exp()

        def look(grad: Tensor, h: Tensor = h) -> Tensor:
            return _grad(h, x, grad) + grad

        z.register_hook(p.hook("z", look if step % 2 else lambda grad: grad * 2))
        with p.backward():
            z.sum().backward()


@scenario(tags=("reentrant", "hooks", "modules"))
def module_gets_a_hook_that_differentiates(p: Probe) -> None:
    """A module has a harmless full backward hook, and gets one that differentiates the layer before it."""
    first, second = p.module(nn.Linear(3, 3)), nn.Tanh()
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    for step in range(2 * STEPS):
        h = first(x)

        def look(module: nn.Module, inputs: Any, outputs: Any, h: Tensor = h) -> tuple[Tensor]:
            return (_grad(h, x, inputs[0]) + inputs[0],)

        handle = second.register_full_backward_hook(look) if step % 2 else None
        y = second(h)
        with p.backward():
            y.sum().backward()
        if handle is not None:
            handle.remove()


@scenario(tags=("reentrant", "hooks"))
def hook_of_a_leaf_differentiates_what_is_not_reached(p: Probe) -> None:
    """A leaf's hook differentiates a part of the graph that the backward has not come to."""
    w, x = p.leaf("w", p.randn(4, requires_grad=True)), p.leaf("x", p.randn(4, requires_grad=True))
    for step in range(STEPS):
        h = x.sin()
        handle = w.register_hook(lambda grad, h=h, step=step: p.value(f"seen{step}", _grad(h, x, grad)))
        with p.backward():
            (h.exp() * w).sum().backward()
        handle.remove()


class Inverse(torch.autograd.Function):
    """Gradients of an inverse: those of the function itself, by which they are divided. It closes over values
    of the running graph, as the transforms of a normalising flow do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, w: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fn, ctx.w = fn, w
        ctx.save_for_backward(x, shift)
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, shift = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.fn(x)
        return _grad(y, x, grads[0]), _grad(y, shift, grads[0]), -_grad(y, ctx.w, grads[0]), None


@scenario(tags=("reentrant", "hooks"))
def hook_of_a_leafs_node_differentiates_what_is_not_reached(p: Probe) -> None:
    """A hook stays on the node of a leaf, which all graphs share, and asks from the second backward on."""
    w = p.leaf("w", p.randn(4, requires_grad=True))
    x = p.leaf("x", p.randn(4, requires_grad=True))
    node = w.view_as(w).grad_fn.next_functions[0][0]
    below: list[Tensor] = []
    handle = node.register_prehook(lambda grads: p.event("quiet", kind="hook"))
    for step in range(STEPS):
        if step == 1:
            handle.remove()
            node.register_prehook(lambda grads: p.value("below", _grad(below[-1], x, grads[0])))
        below.append(x.sin())
        with p.backward():
            (below[-1].exp() * w).sum().backward()


@scenario(tags=("reentrant", "function"))
def function_differentiates_what_it_closes_over(p: Probe) -> None:
    """A Function's backward differentiates through a value that was computed before it."""
    x, w = p.leaf("x", p.randn(4, requires_grad=True)), p.leaf("w", p.randn(4, requires_grad=True))
    for _ in range(STEPS):
        shift = w.sin()
        scale = shift.exp()
        y = Inverse.apply(x * 2, shift, w, lambda t, scale=scale: (t * scale).tanh())
        with p.backward():
            y.sum().backward()


@scenario(tags=("reentrant", "hooks"))
def hook_runs_a_backward_of_another_graph(p: Probe) -> None:
    """A hook that differentiates through no node of the running graph changes nothing for it."""
    x, y = p.leaf("x", p.randn(4, requires_grad=True)), p.leaf("y", p.randn(4, requires_grad=True))
    for _ in range(STEPS):
        other = y.sin().sum()
        z = x.exp()
        z.register_hook(lambda grad, other=other: other.backward())
        with p.backward():
            z.sum().backward()
