"""Hooks over several tensors at once (`register_multi_grad_hook`).

In: a probe. Out: when the hook of a group runs, how often, and with which gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_all(p: Probe) -> None:
    """In mode "all" the hook runs once, when the last gradient of the group has been computed."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a, b, c = x.sin(), x.cos(), x.exp()
    register_multi_grad_hook((a, b, c), p.hook("all", kind="multi_grad"), mode="all")
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        tensor.register_hook(p.hook(name))
    with p.backward():
        (a * b + c).sum().backward()


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_any(p: Probe) -> None:
    """In mode "any" the hook runs once, with the first gradient of the group."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a, b = x.sin(), x.cos()
    register_multi_grad_hook((a, b), p.hook("any", kind="multi_grad"), mode="any")
    a.register_hook(p.hook("a"))
    b.register_hook(p.hook("b"))
    with p.backward():
        (a * b).sum().backward()


@scenario(tags=("hooks", "multi-grad"), issue="pytorch#131794")
def multi_grad_hook_with_an_unused_tensor(p: Probe) -> None:
    """A tensor outside the graph of the loss counts as done, and the hook gets None for it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    used, unused = x.sin(), x.cos()
    register_multi_grad_hook((used, unused), p.hook("all", kind="multi_grad"), mode="all")
    with p.backward():
        used.sum().backward()


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_over_two_backwards(p: Probe) -> None:
    """The count starts anew in every backward: one call each, with the gradients of that backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    register_multi_grad_hook((x, y), p.hook("all", kind="multi_grad"), mode="all")
    register_multi_grad_hook((x, y), p.hook("any", kind="multi_grad"), mode="any")
    with p.backward():
        (x * y).sum().backward()
        (x * 3).sum().backward()


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_and_inputs(p: Probe) -> None:
    """With `inputs=`, a leaf of the group that is left out counts as unused."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    register_multi_grad_hook((x, y), p.hook("all", kind="multi_grad"), mode="all")
    with p.backward():
        (x.sin() * y.cos()).sum().backward(inputs=[x])


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_removed(p: Probe) -> None:
    """Removing the handle of the group removes the hooks of all of its tensors."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    handle = register_multi_grad_hook((x, y), p.hook("all", kind="multi_grad"), mode="all")
    with p.backward():
        (x * y).sum().backward()
        handle.remove()
        (x + y).sum().backward()


@scenario(tags=("hooks", "multi-grad", "errors"))
def multi_grad_hook_raises(p: Probe) -> None:
    """An exception from the hook of a group comes out of backward with its type."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a, b = x.sin(), x.cos()

    def refuse(grads: Any) -> None:
        raise LookupError("refused")

    register_multi_grad_hook((a, b), p.hook("all", refuse, kind="multi_grad"), mode="all")
    with p.backward():
        (a * b).sum().backward()


@scenario(tags=("hooks", "multi-grad", "visibility"))
def multi_grad_hook_on_leaves_and_intermediates(p: Probe) -> None:
    """The group's hook runs when its last member's gradient is known, before that member is accumulated."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def look(grads: Any) -> None:
        p.event("x.grad_is_none", x.grad is None)

    register_multi_grad_hook((x, y), p.hook("all", look, kind="multi_grad"), mode="all")
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("hooks", "multi-grad"))
def multi_grad_hook_and_autograd_grad(p: Probe) -> None:
    """The hook of a group of intermediates also runs for `autograd.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a, b = x.sin(), x.cos()
    register_multi_grad_hook((a, b), p.hook("all", kind="multi_grad"), mode="all")
    with p.backward():
        p.value("grad", torch.autograd.grad((a * b).sum(), x))
