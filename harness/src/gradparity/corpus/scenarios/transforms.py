"""Function transforms and forward-mode differentiation in and around a backward.

In: a probe. Out: Jacobians, Hessians and tangents, next to ordinary gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hvp, jvp, vhp

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _energy(t: Tensor) -> Tensor:
    return (t.exp() * t.sum()).sum()


@scenario(tags=("func", "hooks"))
def func_grad_inside_a_hook(p: Probe) -> None:
    """A hook that calls `torch.func.grad`, `vjp` and `jacrev` on its gradient while the backward runs."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()

    def hook(grad: Tensor) -> Tensor:
        pulled = torch.func.vjp(_energy, grad)[1](torch.ones_like(_energy(grad)))[0]
        return grad + torch.func.grad(_energy)(grad) + torch.func.jacrev(torch.sin)(grad).sum(0) + pulled

    y.register_hook(p.hook("y", hook))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("func", "higher-order"))
def func_grad_of_a_gradient(p: Probe) -> None:
    """What `torch.func.grad` returns is differentiated by a backward with `create_graph`, and again."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        slope = torch.func.grad(_energy)(x)
        (second,) = torch.autograd.grad(slope.pow(2).sum(), x, create_graph=True)
        p.value("second", second)
        second.sum().backward()


@scenario(tags=("func", "higher-order"))
def func_jacrev_of_a_network(p: Probe) -> None:
    """The Jacobian of a network by `jacrev` and by `jacfwd`, inside of the context, then a loss on it."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        jacobian = torch.func.jacrev(model)(x)
        p.value("forward_mode", torch.func.jacfwd(model)(x))
        jacobian.pow(2).sum().backward()


@scenario(tags=("func", "errors"))
def func_vjp_around_a_backward(p: Probe) -> None:
    """A `backward()` inside of a function that `torch.func.vjp` transforms raises."""
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def fn(t: Tensor) -> Tensor:
        (w * w).sum().backward()
        return t.sin() * 2

    with p.backward():
        pull = torch.func.vjp(fn, p.randn(3))[1]
        p.value("vjp", pull(p.randn(3))[0])


@scenario(tags=("func",))
def func_functional_call_training(p: Probe) -> None:
    """Per-sample gradients by vmap over `torch.func.grad`, then an ordinary backward of the same model."""
    model = p.module(nn.Linear(3, 1))
    weights = {name: value.detach() for name, value in model.named_parameters()}
    data = p.randn(4, 3)

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (row,)).pow(2).sum()

    with p.backward():
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, data)
        p.value("each", tuple(each.values()))
        model(data).pow(2).sum().backward()


@scenario(tags=("forward-mode", "hooks"))
def forward_mode_inside_a_hook(p: Probe) -> None:
    """A hook that computes a directional derivative of its gradient in forward mode."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()

    def hook(grad: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(grad.detach(), torch.ones_like(grad))
            tangent = forward_ad.unpack_dual((dual * dual).sin()).tangent
        assert tangent is not None
        return grad + tangent

    y.register_hook(p.hook("y", hook))
    with p.backward():
        (y * y).sum().backward()


@scenario(tags=("forward-mode", "higher-order"))
def forward_mode_over_a_backward(p: Probe) -> None:
    """A Hessian-vector product by forward mode over reverse: the gradient carries a tangent."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, p.randn(3))
        (grad,) = torch.autograd.grad((dual.exp() * dual.sin()).sum(), dual)
        primal, tangent = forward_ad.unpack_dual(grad)
        p.value("primal", primal)
        p.value("tangent", tangent)


class _OwnTangent(torch.autograd.Function):
    """A sine whose gradient is another one's, and whose tangent a third one's."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 5


@scenario(tags=("compiled", "forward-mode"), issue="pytorch#192985")
def tangent_of_a_functions_own(p: Probe) -> None:
    """The `jvp` of a Function counts in forward mode, whether or not the code was compiled before."""
    x, fresh = p.leaf("x", p.randn(3, requires_grad=True)), p.compile(lambda t: _OwnTangent.apply(t).exp())
    run = p.compile(lambda t: _OwnTangent.apply(t) * 2)
    with p.backward():
        run(x).sum().backward()
    p.value("without a gradient", run(x.detach()))
    for name, call in (("before", run), ("fresh", fresh)):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            p.value(name, forward_ad.unpack_dual(call(dual)).tangent)
    with p.backward():
        run(x).sum().backward()


@scenario(tags=("higher-order",))
def products_with_the_hessian(p: Probe) -> None:
    """`hvp`, `vhp` and `jvp` of `torch.autograd.functional`: double backwards in several arrangements."""
    x, v = p.randn(3), p.randn(3)
    with p.backward():
        p.value("hvp", hvp(_energy, x, v)[1])
        p.value("vhp", vhp(_energy, x, v)[1])
        p.value("jvp", jvp(lambda t: t.exp() * t.sum(), x, v)[1])


@scenario(tags=("higher-order", "batched"))
def rows_of_a_hessian_at_once(p: Probe) -> None:
    """`is_grads_batched` differentiates a differentiable gradient for several cotangents at once."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (grad,) = torch.autograd.grad(_energy(x), x, create_graph=True)
        rows = torch.autograd.grad(
            grad, x, torch.eye(3, dtype=x.dtype, device=x.device), is_grads_batched=True
        )
    p.value("hessian", rows[0])


@scenario(tags=("higher-order",))
def inner_steps_of_a_network(p: Probe) -> None:
    """MAML: two inner steps of a small network on a support set, a loss on a query set, two tasks."""
    model = p.module(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    names = [name for name, _ in model.named_parameters()]
    with p.backward():
        for task in range(2):
            weights: list[Tensor] = list(model.parameters())
            support, query = p.randn(4, 2), p.randn(5, 2)
            for _ in range(2):
                out = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (support,))
                grads = torch.autograd.grad((out - task).pow(2).mean(), weights, create_graph=True)
                weights = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
            out = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (query,))
            (out - task).pow(2).mean().backward()


@scenario(tags=("higher-order",))
def newton_steps_by_conjugate_gradients(p: Probe) -> None:
    """A quarter of an optimizer: Hessian-vector products of one retained gradient graph, three in a row."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    loss = (x.cosh() * (x.outer(x)).exp().sum(0)).sum()
    with p.backward():
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        direction = grad.detach()
        for step in range(3):
            (direction,) = torch.autograd.grad(grad @ direction, x, retain_graph=True)
            direction = direction / direction.norm()
            p.value(f"direction{step}", direction)
