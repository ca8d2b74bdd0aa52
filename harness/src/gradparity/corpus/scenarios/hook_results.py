"""What a tensor hook hands back: shapes, dtypes, aliases, and gradients that outlive the backward.

In: a probe. Out: the gradients that follow from the hooks' results, or the type of eager's own exception.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _loss_through_hook(p: Probe, result: Any) -> Tensor:
    """Return a loss over a tensor whose hook hands back ``result(grad)``."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = x.sin()
    y.register_hook(p.hook("y", result))
    return y.sum()


@scenario(tags=("hooks", "errors"))
def hook_returns_another_shape(p: Probe) -> None:
    """A hook that changes the shape of its gradient is refused with a RuntimeError."""
    loss = _loss_through_hook(p, lambda g: g.sum(0))
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "errors"))
def hook_returns_a_broadcastable_shape(p: Probe) -> None:
    """Even a result that would broadcast to the gradient's shape is refused."""
    loss = _loss_through_hook(p, lambda g: g[:1])
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "errors"))
def hook_returns_another_dtype(p: Probe) -> None:
    """A hook that changes the dtype of its gradient is refused with a RuntimeError."""
    loss = _loss_through_hook(p, lambda g: g.to(torch.bfloat16))
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "errors"))
def hook_returns_a_number(p: Probe) -> None:
    """A hook that returns something other than a tensor or None is refused with a TypeError."""
    loss = _loss_through_hook(p, lambda g: 2.0)
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "errors"))
def hook_returns_a_tuple(p: Probe) -> None:
    """A tensor hook must return one tensor; a tuple of one is a TypeError."""
    loss = _loss_through_hook(p, lambda g: (g,))
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "layout"))
def leaf_hook_returns_an_expanded_tensor(p: Probe) -> None:
    """A hook result with zero strides is copied when it becomes `.grad`, so the layout is the leaf's."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: g[:, :1].expand(3, 4)))
    with p.backward():
        x.sin().sum().backward()


@scenario(tags=("hooks", "layout"))
def leaf_hook_returns_a_transposed_tensor(p: Probe) -> None:
    """A hook result with other strides than the leaf's is laid out anew when it becomes `.grad`."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: g.t().contiguous().t() * 2))
    with p.backward():
        x.sin().sum().backward()


@scenario(tags=("hooks", "aliasing"))
def leaf_hook_returns_a_tensor_of_the_user(p: Probe) -> None:
    """A result that the user still holds is copied, so that `.grad` does not share its memory."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    kept = p.tensor([1.0, 2.0, 3.0])
    x.register_hook(p.hook("x", lambda g: kept))
    with p.backward():
        x.sin().sum().backward()
    assert x.grad is not None
    p.event("shares_memory", x.grad.data_ptr() == kept.data_ptr())
    x.grad.zero_()
    p.value("kept", kept)


@scenario(tags=("hooks", "aliasing"))
def hook_keeps_the_gradient_of_a_leaf(p: Probe) -> None:
    """A gradient that a hook has kept is not changed by later accumulation into `.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    kept: list[Tensor] = []
    x.register_hook(p.hook("x", kept.append))
    with p.backward():
        x.sin().sum().backward()
        (x * x).sum().backward()
    p.value("kept", tuple(kept))
    assert x.grad is not None
    p.event("shares_memory", [x.grad.data_ptr() == g.data_ptr() for g in kept] == [False, False])


@scenario(tags=("hooks", "aliasing"))
def hook_keeps_gradients_along_a_chain(p: Probe) -> None:
    """Gradients kept from hooks along a chain still hold their values after the backward."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    kept: list[Tensor] = []
    h = x
    for i in range(4):
        h = h.sigmoid() + x
        h.register_hook(p.hook(f"h{i}", kept.append))
    with p.backward():
        h.sum().backward()
    p.value("kept", tuple(kept))


@scenario(tags=("hooks", "data-dependent"))
def hook_clips_by_norm(p: Probe) -> None:
    """A hook may decide on the value of its gradient: too long ones are scaled, short ones are left."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def clip(grad: Tensor) -> Tensor | None:
        norm = grad.norm()
        p.event("too_long", bool(norm > 1.0))
        return grad / norm if norm > 1.0 else None

    long, short = x.exp(), x.sin()
    for name, tensor in (("long", long), ("short", short)):
        tensor.register_hook(p.hook(name, clip))
    with p.backward():
        (long * 10 + short * 0.01).sum().backward()


@scenario(tags=("hooks",))
def hook_changes_with_every_call(p: Probe) -> None:
    """A hook with state of its own gives a different factor in each of three backwards."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    calls: list[int] = []

    def scale(grad: Tensor) -> Tensor:
        calls.append(1)
        return grad * len(calls)

    y = x.sin()
    y.register_hook(p.hook("y", scale))
    with p.backward():
        for _ in range(3):
            y.sum().backward(retain_graph=True)
    p.value("calls", len(calls))


@scenario(tags=("hooks",))
def hook_on_the_loss(p: Probe) -> None:
    """A hook on the root itself sees the initial gradient and may replace it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    loss = x.sin().sum()
    loss.register_hook(p.hook("loss", lambda g: g * 3))
    with p.backward():
        loss.backward()


@scenario(tags=("hooks", "undefined"))
def hooks_on_several_outputs_of_one_node(p: Probe) -> None:
    """Hooks on outputs of one node run in the order of registration; that of an unused output gets None."""
    x = p.leaf("x", p.randn(4, 2, requires_grad=True))
    outputs = x.exp().unbind(0)
    for i in (2, 0, 1):
        outputs[i].register_hook(p.hook(f"output{i}", lambda g: None if g is None else g * 2))
    with p.backward():
        (outputs[2] * 5 + outputs[0]).sum().backward()


@scenario(tags=("hooks", "data-dependent"))
def hook_drops_small_entries(p: Probe) -> None:
    """A hook may compute with shapes that depend on values, as long as it gives the shape back."""
    x = p.leaf("x", p.randn(8, requires_grad=True))
    y = x.sin()

    def keep_largest(grad: Tensor) -> Tensor:
        large = grad[grad.abs() > 0.5]
        p.event("kept", large.numel(), float(large.sum()) != 0.0)
        return torch.where(grad.abs() > 0.5, grad, torch.zeros_like(grad))

    y.register_hook(p.hook("y", keep_largest))
    with p.backward():
        (y * p.randn(8)).sum().backward()


@scenario(tags=("hooks",))
def hook_computes_under_enable_grad(p: Probe) -> None:
    """A hook may switch gradients on for itself; what it builds does not leak into the backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def derive(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = grad.detach().requires_grad_()
            (derivative,) = torch.autograd.grad(inner.pow(3).sum(), inner)
        p.event("grad_mode", torch.is_grad_enabled())
        return derivative

    y.register_hook(p.hook("y", derive))
    with p.backward():
        (y * 2).sum().backward()
