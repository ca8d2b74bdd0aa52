"""Which gradients are one tensor and which are two: memory, objects, strides.

In: a probe. Out: booleans about shared memory and identity as eager has them, and what in-place writes show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils import parametrize

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("aliasing", "hooks"))
def in_place_hook_changes_the_users_tensor(p: Probe) -> None:
    """A hook on the root that works in place changes the very tensor that the user passed as gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    mine = p.tensor([1.0, 2.0, 3.0])

    def double(grad: Tensor) -> None:
        grad.mul_(2)

    y.register_hook(p.hook("y", double))
    with p.backward():
        y.backward(mine)
    p.value("mine", mine)


@scenario(tags=("aliasing", "hooks"))
def in_place_hook_on_a_piece(p: Probe) -> None:
    """The gradient of a concatenated piece is a view of the whole one: an in-place hook changes the whole."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    y = p.leaf("y", p.randn(2, requires_grad=True))
    first, second = x.sin(), y.sin()
    whole = torch.cat([first, second])
    kept: list[Tensor] = []

    def zero(grad: Tensor) -> None:
        grad.zero_()

    whole.register_hook(p.hook("whole", kept.append))
    first.register_hook(p.hook("first", zero))
    with p.backward():
        whole.exp().sum().backward()
    p.value("kept", tuple(kept))


@scenario(tags=("aliasing", "hooks"))
def hooks_get_the_same_object(p: Probe) -> None:
    """What one hook returns is the very object that the next hook gets."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    made: list[Tensor] = []

    def make(grad: Tensor) -> Tensor:
        made.append(grad * 2)
        return made[0]

    y.register_hook(p.hook("make", make))
    y.register_hook(p.hook("compare", lambda g: p.event("same_object", g is made[0])))
    with p.backward():
        y.sum().backward()


@scenario(tags=("aliasing", "hooks", "layout"))
def strides_of_gradients_in_hooks(p: Probe) -> None:
    """Hooks see gradients as operations made them: expanded by a sum, transposed, cut and added."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def look(site: str) -> Any:
        return p.hook(site, lambda g: p.event("strides", g.stride(), g.storage_offset()))

    expanded = x.sin()
    turned = x.cos()
    cut = x.exp()
    for site, tensor in (("expanded", expanded), ("turned", turned), ("cut", cut), ("x", x)):
        tensor.register_hook(look(site))
    scale = p.randn(4, 3)
    with p.backward():
        expanded.sum().backward()
        (turned.t() * scale).sum().backward()
        (torch.cat([cut, cut], 1) * p.randn(3, 8)).sum().backward()


@scenario(tags=("aliasing", "retain-grad"))
def retained_grad_and_leaf_grad(p: Probe) -> None:
    """A retained gradient and the `.grad` of the leaf below it do not share memory."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = x.view(2, 2)
    y.retain_grad()
    with p.backward():
        (y * p.randn(2, 2)).sum().backward()
    assert y.grad is not None
    assert x.grad is not None
    p.event("shares_memory", y.grad.data_ptr() == x.grad.data_ptr())
    y.grad.zero_()


@scenario(tags=("aliasing", "inputs"))
def gradients_returned_by_autograd_grad(p: Probe) -> None:
    """`autograd.grad` may return one tensor twice, or the user's own gradient: identity as eager has it."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    mine = p.randn(4)
    with p.backward():
        gx, gy = torch.autograd.grad(x + y, [x, y], mine)
        (twice, again) = torch.autograd.grad((x * y).sum(), [x, x])
    p.event("memory", gx.data_ptr() == gy.data_ptr(), gx.data_ptr() == mine.data_ptr())
    p.event("objects", gx is gy, gx is mine, twice is again)


class OneGradientForBoth(torch.autograd.Function):
    """A sum whose backward returns one new tensor for both inputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        doubled = grad * 2
        return doubled, doubled


@scenario(tags=("aliasing", "function"))
def function_returns_one_tensor_twice(p: Probe) -> None:
    """One tensor returned for two leaves becomes two `.grad`s; in-place hooks above reach both sides."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))

    def negate(grad: Tensor) -> None:
        grad.neg_()

    first, second = x.exp(), y.exp()
    second.register_hook(p.hook("second", negate))
    first.register_hook(p.hook("first"))
    with p.backward():
        OneGradientForBoth.apply(x, y).sum().backward()
        OneGradientForBoth.apply(first, second).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    p.event("shares_memory", x.grad.data_ptr() == y.grad.data_ptr())


@scenario(tags=("aliasing", "function"))
def function_returns_an_expanded_gradient(p: Probe) -> None:
    """Gradients with zero strides from a Function become ordinary `.grad`s."""

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
            return x.mean()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return (grad / 12).expand(3, 4)

    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with p.backward():
        Mean.apply(x).backward()
    assert x.grad is not None
    x.grad[0, 0] = 7


@scenario(tags=("aliasing", "hooks"))
def hook_returns_a_leaf_that_requires_grad(p: Probe) -> None:
    """A parameter that a hook returns as gradient is copied; `.grad` requires no gradient itself."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x", lambda g: w))
    with p.backward():
        x.sin().sum().backward()
    assert x.grad is not None
    p.event("requires_grad", x.grad.requires_grad, x.grad.data_ptr() == w.data_ptr())


@scenario(tags=("aliasing", "hooks"))
def hook_of_a_leaf_that_is_gone(p: Probe) -> None:
    """The hooks of a leaf that nobody holds any more still run."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    gone = p.randn(3, requires_grad=True)
    gone.register_hook(p.hook("gone"))
    gone.register_post_accumulate_grad_hook(p.hook("gone.acc", kind="post_acc"))
    loss = (x.sin() * gone).sum()
    del gone
    with p.backward():
        loss.backward()


class Symmetric(nn.Module):
    """A parametrisation that makes a matrix symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@scenario(tags=("aliasing", "module"))
def parametrized_weight(p: Probe) -> None:
    """A weight behind a parametrisation: its gradient arrives at the tensor underneath, over two steps."""
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    p.module(layer)
    for _ in range(2):
        with p.backward():
            layer(p.randn(2, 3)).pow(2).sum().backward()


@scenario(tags=("aliasing", "sums"))
def many_uses_of_one_tensor(p: Probe) -> None:
    """A hundred gradients meet in one buffer and are added one after the other."""
    x = p.leaf("x", p.randn(8, requires_grad=True))
    hub = x.sin()
    hub.register_hook(p.hook("hub"))
    with p.backward():
        torch.stack([hub * p.randn(8) for _ in range(100)]).mean(0).exp().sum().backward()


@scenario(tags=("aliasing", "accumulation"))
def gradients_as_views_of_one_buffer(p: Probe) -> None:
    """Where all `.grad`s are views of one flat buffer, accumulation writes into that buffer."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params), dtype=p.dtype, device=p.device)
    for param, piece in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = piece.view_as(param)
    for _ in range(2):
        with p.backward():
            model(p.randn(2, 3)).sum().backward()
    p.value("flat", flat)


@scenario(tags=("aliasing", "accumulation"))
def one_grad_for_two_leaves(p: Probe) -> None:
    """Two leaves that were given the same tensor as `.grad` both add to it, in the order of accumulation."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    shared = p.randn(3)
    for name, leaf in (("x", x), ("y", y)):
        leaf.grad = shared
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    with p.backward():
        (x.sin() * y).sum().backward()
    p.value("shared", shared)
