"""Gradients of gradients, and autograd that starts inside of a backward.

In: a probe. Out: second derivatives in their usual forms, and hooks that run under `create_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("higher-order",))
def double_backward(p: Probe) -> None:
    """The gradient of a gradient, with a hook that sees both passes."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.pow(3)
    y.register_hook(p.hook("y", lambda g: p.event("grad", g.requires_grad, torch.is_grad_enabled())))
    with p.backward():
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.register_hook(p.hook("first"))
        first.pow(2).sum().backward()


@scenario(tags=("higher-order",))
def gradient_penalty(p: Probe) -> None:
    """A critic's loss with a penalty on the norm of its input gradient, over two training steps."""
    critic = p.module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    for _ in range(2):
        x = p.randn(5, 3, requires_grad=True)
        score = critic(x)
        with p.backward():
            (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            (score.mean() + (grad.norm(dim=1) - 1).pow(2).mean()).backward()
        p.value("input_grad", x.grad)


@scenario(tags=("higher-order",))
def hessian_vector_product(p: Probe) -> None:
    """A Hessian-vector product by differentiating the gradient's product with a vector."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    v = p.randn(4)
    loss = (x.sin() * x.outer(x).exp().sum(0)).sum()
    with p.backward():
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        p.value("hvp", torch.autograd.grad(grad @ v, x))


@scenario(tags=("higher-order",))
def third_derivative(p: Probe) -> None:
    """Three derivatives in a row of one function of one variable."""
    x = p.leaf("x", p.tensor(0.7, requires_grad=True))
    value = x.sin() * x.exp()
    with p.backward():
        for order in range(3):
            (value,) = torch.autograd.grad(value, x, create_graph=order < 2)
            p.value(f"order{order}", value)


@scenario(tags=("higher-order",))
def forces_model(p: Probe) -> None:
    """A model of energies trained on forces: the loss contains the gradient with respect to positions."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)))
    positions = p.leaf("positions", p.randn(5, 3, requires_grad=True))
    energy = p.compile(model)(positions).sum()
    with p.backward():
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        (forces + p.randn(5, 3)).pow(2).mean().backward()
    p.value("forces", forces)


@scenario(tags=("higher-order",))
def unrolled_inner_step(p: Probe) -> None:
    """Meta-learning: a loss after an inner gradient step, differentiated with respect to the start."""
    start = p.leaf("start", p.randn(3, requires_grad=True))
    rate = p.leaf("rate", p.tensor(0.1, requires_grad=True))
    data = p.randn(4, 3)
    weights = start
    with p.backward():
        for _ in range(2):
            (grad,) = torch.autograd.grad((data @ weights).pow(2).mean(), weights, create_graph=True)
            weights = weights - rate * grad
        (data @ weights - 1).pow(2).mean().backward()


class Scaled(torch.autograd.Function):
    """Sine with a backward that is itself differentiable."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 1.5


@scenario(tags=("higher-order", "function"))
def double_backward_through_a_function(p: Probe) -> None:
    """With `create_graph` the operations inside a Function's backward are recorded and differentiated."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (first,) = torch.autograd.grad(Scaled.apply(x).pow(2).sum(), x, create_graph=True)
        p.value("second", torch.autograd.grad(first.sum(), x))


@scenario(tags=("higher-order", "hooks"))
def hook_under_create_graph(p: Probe) -> None:
    """What a hook computes under `create_graph` becomes part of the graph of the gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.exp()
    y.register_hook(p.hook("y", lambda g: g * x.sin()))
    with p.backward():
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        p.value("second", torch.autograd.grad(first.sum(), x))


@scenario(tags=("higher-order", "hooks", "reentrant"))
def autograd_grad_inside_a_hook(p: Probe) -> None:
    """A hook that differentiates something else starts a backward inside of the backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.sin()
    other = p.randn(3, requires_grad=True)

    def derive(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            (inner,) = torch.autograd.grad(other.pow(3).sum(), other)
        return grad + inner

    y.register_hook(p.hook("y", derive))
    with p.backward():
        y.exp().sum().backward()


@scenario(tags=("higher-order", "hooks", "reentrant"))
def backward_inside_a_hook(p: Probe) -> None:
    """A hook may run another backward to its end; its leaves and hooks come in between."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))
    w.register_post_accumulate_grad_hook(p.hook("w", kind="post_acc"))
    side = (w.exp() * w).sum()
    y = x.sin()
    z = y.exp()
    y.register_hook(p.hook("y"))
    z.register_hook(p.hook("z", lambda g: side.backward()))
    with p.backward():
        (z * w).sum().backward()


class RunsBackward(torch.autograd.Function):
    """Identity whose backward runs a backward of its own into a leaf."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            (x.detach() * w).backward(grad)
        return grad * w.detach(), None


@scenario(tags=("higher-order", "function", "reentrant"))
def backward_inside_a_function(p: Probe) -> None:
    """A Function whose backward accumulates into a leaf by itself, before the outer backward gets there."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.leaf("w", p.randn(3, requires_grad=True))
    w.register_post_accumulate_grad_hook(p.hook("w", kind="post_acc"))
    y = RunsBackward.apply(x.sin(), w)
    with p.backward():
        (y * w.cos()).sum().backward()


@scenario(tags=("higher-order", "func"))
def func_grad_inside_a_function(p: Probe) -> None:
    """`torch.func` transforms inside a function that is then differentiated by autograd."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    inner = torch.func.vmap(torch.func.grad(lambda t: t.sin() * t**2))
    with p.backward():
        inner(x).pow(2).sum().backward()


class Doubled(torch.autograd.Function):
    """A Function that `torch.func` can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x


@scenario(tags=("higher-order", "func", "function"), issue="pytorch#193279")
def func_grad_over_a_function(p: Probe) -> None:
    """`torch.func.grad` over a custom Function uses its backward, also inside a larger graph."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    slope = p.compile(lambda t: torch.func.grad(lambda u: Doubled.apply(u).sin().sum())(t))
    result = slope(x)
    p.value("slope", result)
    with p.backward():
        (result * x).sum().backward()


@scenario(tags=("higher-order", "func"))
def jacobian_and_hessian(p: Probe) -> None:
    """Jacobian and Hessian by `torch.autograd.functional`, which runs many backwards."""
    x = p.randn(3)
    with p.backward():
        p.value("jacobian", torch.autograd.functional.jacobian(lambda t: t.sin() * t.sum(), x))
        p.value("hessian", torch.autograd.functional.hessian(lambda t: (t.exp() * t).sum(), x))


@scenario(tags=("compiled", "higher-order", "func"))
def compiled_transform_of_what_does_not_depend_on_its_input(p: Probe) -> None:
    """Transforms of a function of its closure alone; what is compiled afterwards is no worse for it."""
    x, w = p.leaf("x", p.randn(3, requires_grad=True)), p.leaf("w", p.randn(3, 4, requires_grad=True))

    def constant(_: Tensor) -> Tensor:
        return w[:, :1].expand(-1, 2) * 2

    transforms: dict[str, Callable[[Tensor], Any]] = {
        "vjp": lambda t: torch.func.vjp(constant, t)[1](w[:, :2])[0],
        "jvp": lambda t: torch.func.jvp(constant, (t,), (t,))[1],
        "jacrev": lambda t: torch.func.jacrev(constant)(t),
        "jacfwd": lambda t: torch.func.jacfwd(constant)(t),
        "vmap": lambda t: torch.func.vmap(constant)(t),
        "hessian": lambda t: torch.func.hessian(lambda u: constant(u).sum())(t),
    }
    for name, transform in transforms.items():
        out = p.compile(lambda t, transform=transform: transform(t).sum() + t.sum())(x)
        p.value(name, out.detach())
        with p.backward():
            (out * p.compile(torch.sin)(x).sum()).backward()


@scenario(tags=("compiled", "higher-order", "func"))
def compiled_linearize(p: Probe) -> None:
    """`torch.func.linearize`, which makes a graph of its own, of a function of what was computed before."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sine": torch.sin,
        "choice": lambda t: torch.where(t > 0.1, t * 2, t / 2),
        "product": lambda t: t * 2,
    }
    for name, function in functions.items():
        for inner in (torch.tanh, lambda t: t):
            run = p.compile(lambda t, f=function, g=inner: torch.func.linearize(f, g(t))[1](t * 0.5))
            out = run(x)
            p.value(name, out)
            with p.backward():
                (out * out.detach()).sum().backward()
