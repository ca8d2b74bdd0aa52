"""Islands without gradient: no_grad, detach, inference mode, toggles of requires_grad; retained gradients.

In: a probe. Out: what gradients pass round and do not reach, and when retained gradients become visible.
"""

from __future__ import annotations

import torch

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.probe import Probe


@scenario(tags=("islands",))
def no_grad_island(p: Probe) -> None:
    """What is computed under no_grad is a constant for the backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.no_grad():
        scale = x.exp()
        with torch.enable_grad():
            inner = x.sin()
    p.event("requires_grad", scale.requires_grad, inner.requires_grad)
    with p.backward():
        (x * scale + inner).sum().backward()


@scenario(tags=("islands",))
def detached_branch(p: Probe) -> None:
    """A detached branch gets no gradient, though it shares its memory with one that does."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y.detach() * y).sum().backward()


@scenario(tags=("islands",))
def detached_in_place(p: Probe) -> None:
    """`detach_` cuts a tensor off its history; the leaf below gets nothing through it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp() + 1
    z = y * 2
    y.detach_()
    with p.backward():
        (z + y).sum().backward()


@scenario(tags=("islands",))
def straight_through_estimator(p: Probe) -> None:
    """The straight-through trick: the value of a rounding, the gradient of the identity."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = x + (x.round() - x).detach()
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * p.randn(4)).sum().backward()


@scenario(tags=("islands",))
def target_network(p: Probe) -> None:
    """A loss against a target from the same weights: only the online side gets gradients."""
    layer = p.module(torch.nn.Linear(3, 2))
    x = p.randn(4, 3)
    with torch.no_grad():
        target = layer(x) + 0.1
    with p.backward():
        (layer(x) - target).pow(2).mean().backward()


@scenario(tags=("islands",))
def requires_grad_switched_off_afterwards(p: Probe) -> None:
    """A leaf that is frozen between forward and backward gets no `.grad`, but the backward still runs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x"))
    loss = (x.sin() * y).sum()
    x.requires_grad_(False)
    with p.backward():
        loss.backward()


@scenario(tags=("islands",))
def frozen_and_thawed_between_steps(p: Probe) -> None:
    """Freezing one parameter in every other step changes which gradients there are, step by step."""
    layer = p.module(torch.nn.Linear(3, 2))
    layer.bias.register_hook(p.hook("bias"))
    for step in range(4):
        layer.weight.requires_grad_(step % 2 == 0)
        layer.zero_grad()
        with p.backward():
            layer(p.randn(2, 3)).pow(2).sum().backward()
        p.value(f"weight{step}", layer.weight.grad)


@scenario(tags=("islands",))
def inference_tensor_as_constant(p: Probe) -> None:
    """A tensor made in inference mode can be added, since it need not be saved."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.inference_mode():
        constant = x.exp()
    with p.backward():
        (x + constant).sum().backward()


@scenario(tags=("islands", "errors"))
def inference_tensor_saved(p: Probe) -> None:
    """A tensor made in inference mode must not be saved for backward: a RuntimeError in forward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.inference_mode():
        constant = x.exp()
    with p.backward():
        (x * constant).sum().backward()


@scenario(tags=("islands",))
def backward_under_no_grad(p: Probe) -> None:
    """Backward runs as usual when it is called under no_grad."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    loss = x.exp().sum()
    loss.register_hook(p.hook("loss", lambda g: p.event("grad_mode", torch.is_grad_enabled())))
    with torch.no_grad(), p.backward():
        loss.backward()


@scenario(tags=("retain-grad", "hooks"))
def retain_grad_of_an_intermediate(p: Probe) -> None:
    """`retain_grad` sets `.grad` of an inner tensor, and adds to it in the next backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.retain_grad()
    with p.backward():
        y.exp().sum().backward(retain_graph=True)
        p.value("once", y.grad)
        y.sum().backward()
    p.value("twice", y.grad)


@scenario(tags=("retain-grad", "hooks", "order"))
def retain_grad_comes_after_tensor_hooks(p: Probe) -> None:
    """A retained gradient is taken after all tensor hooks, even those registered later, before node hooks."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("first", lambda g: g * 2))
    y.retain_grad()
    y.register_hook(p.hook("second", lambda g: p.event("y.grad_is_none", y.grad is None)))
    y.register_hook(p.hook("third", lambda g: g + 1))
    look = p.hook("pre", lambda grads: p.event("y.grad", y.grad), kind="node_pre")
    node_of(y).register_prehook(look)
    with p.backward():
        y.exp().sum().backward()
    p.value("y.grad", y.grad)


@scenario(tags=("retain-grad", "visibility"))
def retained_grads_become_visible_in_order(p: Probe) -> None:
    """While the backward runs, retained gradients appear one by one, from the loss downwards."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    chain = [x.sin()]
    for _ in range(3):
        chain.append(chain[-1].exp().log1p())
    for i, tensor in enumerate(chain):
        tensor.retain_grad()
        seen = p.hook(f"chain{i}", lambda g: p.event("set", *(t.grad is not None for t in chain)))
        tensor.register_hook(seen)
    with p.backward():
        chain[-1].sum().backward()
    p.value("grads", tuple(tensor.grad for tensor in chain))


@scenario(tags=("retain-grad", "undefined"))
def retain_grad_outside_the_loss(p: Probe) -> None:
    """The retained `.grad` of a tensor that the loss does not use stays None."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    used, unused = x.sin(), x.cos()
    used.retain_grad()
    unused.retain_grad()
    with p.backward():
        used.sum().backward()
    p.value("grads", (used.grad, unused.grad))
