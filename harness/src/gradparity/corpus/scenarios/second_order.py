"""Graphs of gradients: what is saved, freed and changed in place when a gradient is differentiated.

In: a probe. Out: second and third derivatives, hooks of both passes, and eager's errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("higher-order",))
def every_order_of_a_network(p: Probe) -> None:
    """Each derivative is differentiated again with respect to all parameters, three times."""
    model = p.module(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    value = model(p.randn(4, 2)).pow(2).mean()
    with p.backward():
        for order in range(3):
            grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            value = torch.stack([grad.pow(2).sum() for grad in grads]).sum()
            p.value(f"order{order}", grads)
        value.backward()


@scenario(tags=("higher-order", "hooks"))
def hooks_of_gradients_and_of_leaves(p: Probe) -> None:
    """Independent gradients: each one's hook is followed at once by the accumulation into its leaf."""
    leaves = [p.leaf(f"x{i}", p.randn(3, requires_grad=True)) for i in range(3)]
    for i, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(p.hook(f"accumulated{i}", kind="post_acc"))
    with p.backward():
        total = torch.stack([leaf.pow(3).sum() for leaf in leaves]).sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        for i, grad in enumerate(grads):
            grad.register_hook(p.hook(f"grad{i}"))
        torch.stack([grad.pow(2).sum() for grad in grads]).sum().backward()


@scenario(tags=("higher-order", "hooks"))
def leaves_of_a_product_in_order(p: Probe) -> None:
    """Leaves that meet in one product are accumulated, in the second backward, in eager's order."""
    leaves = [p.leaf(f"x{i}", p.randn(3, requires_grad=True)) for i in range(4)]
    for i, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(p.hook(f"accumulated{i}", kind="post_acc"))
    product = leaves[0]
    for leaf in leaves[1:]:
        product = product * leaf
    with p.backward():
        grads = torch.autograd.grad(product.sum(), leaves, create_graph=True)
        torch.stack([grad.pow(2).sum() for grad in grads]).sum().backward()


@scenario(tags=("higher-order", "freed"))
def parts_of_a_gradient_one_after_the_other(p: Probe) -> None:
    """Gradients that share no saved tensor may be differentiated one by one without `retain_graph`."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xy")
    with p.backward():
        grads = torch.autograd.grad((x.exp() * x).sum() + (y.sin() * y).sum(), (x, y), create_graph=True)
        grads[0].sum().backward()
        grads[1].sum().backward()


@scenario(tags=("higher-order", "freed", "errors"))
def gradient_differentiated_twice(p: Probe) -> None:
    """A gradient's graph is freed by its first backward; the second raises."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (grad,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        grad.sum().backward()
        grad.sum().backward()


@scenario(tags=("higher-order", "in-place", "errors"))
def saved_by_the_first_backward_then_changed(p: Probe) -> None:
    """What the first backward saved is changed in place before the second, which raises."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    factor = p.randn(3, requires_grad=True)
    with p.backward():
        (grad,) = torch.autograd.grad((x.exp() * factor).pow(2).sum(), x, create_graph=True)
        with torch.no_grad():
            factor.add_(1)
        grad.sum().backward()


@scenario(tags=("higher-order", "in-place"))
def read_by_the_first_backward_then_changed(p: Probe) -> None:
    """A leaf that the first backward reads but does not save may be changed: the old value counts."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        with torch.no_grad():
            x.add_(1)
        grad.sum().backward()


@scenario(tags=("higher-order", "in-place"))
def gradients_changed_in_place(p: Probe) -> None:
    """Differentiable gradients are changed in place, wholly and in part, and then differentiated."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xy")
    with p.backward():
        gx, gy = torch.autograd.grad((x.exp() * y.sin()).sum(), (x, y), create_graph=True)
        gx.mul_(2)
        gy[0] = gx[1] * 3
        (gx * gx + gy).sum().backward()
    p.value("gradients", (gx, gy))


@scenario(tags=("higher-order", "accumulate"))
def backward_that_creates_a_graph(p: Probe) -> None:
    """`backward(create_graph=True)` twice: `.grad` has a graph, which the second accumulation extends."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    w = p.randn(3, requires_grad=True)
    with p.backward():
        for _ in range(2):
            (x.exp() * w.sin()).sum().backward(create_graph=True)
        assert x.grad is not None
        p.event("grad", x.grad.requires_grad)
        p.value("second", torch.autograd.grad(x.grad.pow(2).sum(), w))
    x.grad = x.grad.detach()
    w.grad = None


@scenario(tags=("higher-order",))
def which_gradients_require_grad(p: Probe) -> None:
    """Only a gradient that depends on something that requires grad does so itself."""
    x, y, z = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xyz")
    with p.backward():
        total = (x * 2).sum() + (y * y).sum() + z.sum()
        grads = torch.autograd.grad(total, (x, y, z), create_graph=True)
        p.event("requires", *(str(grad.requires_grad) for grad in grads))
        second = torch.autograd.grad(grads[1].sum(), (x, y, z), allow_unused=True)
    p.value("second", second)


class Once(torch.autograd.Function):
    """A square whose backward cannot be differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@scenario(tags=("higher-order", "function", "errors"))
def once_differentiable_differentiated_twice(p: Probe) -> None:
    """The error comes with the second backward, not with the first."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (grad,) = torch.autograd.grad((Once.apply(x) * x).sum(), x, create_graph=True)
        p.value("first", grad)
        grad.sum().backward()


@scenario(tags=("higher-order", "errors"))
def derivative_that_does_not_exist(p: Probe) -> None:
    """The loss of CTC has one derivative: the second raises, and only when it is asked for."""
    x = p.leaf("x", p.randn(5, 2, 4, requires_grad=True))
    targets = torch.tensor([[1, 2], [3, 1]])
    loss = functional.ctc_loss(x.log_softmax(-1), targets, torch.tensor([5, 5]), torch.tensor([2, 2]))
    with p.backward():
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        p.value("first", grad)
        grad.sum().backward()


@scenario(tags=("higher-order", "saved-tensor-hooks"))
def pack_hooks_around_a_differentiable_backward(p: Probe) -> None:
    """Saved-tensor hooks see every tensor that the first backward saves for the second."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    loss = (x.exp() * x).sum()
    with p.backward():
        with torch.autograd.graph.saved_tensors_hooks(
            p.hook("pack", lambda t: t), p.hook("unpack", lambda t: t)
        ):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.sum().backward()


@scenario(tags=("higher-order", "saved-tensor-hooks"))
def pack_hooks_around_the_second_backward(p: Probe) -> None:
    """The second backward saves nothing, so that saved-tensor hooks around it see nothing."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        with torch.autograd.graph.saved_tensors_hooks(
            p.hook("pack", lambda t: t), p.hook("unpack", lambda t: t)
        ):
            grad.sum().backward()


@scenario(tags=("higher-order", "in-place", "views"))
def second_derivative_through_views(p: Probe) -> None:
    """In-place operations on overlapping views of a clone, differentiated twice."""
    x, w = (p.leaf(name, p.randn(4, 3, requires_grad=True)) for name in "xw")
    y = (x * 2).clone()
    y[:, 0].mul_(w[:, 1])
    y[1:3].add_(w[0:2])
    with p.backward():
        grads = torch.autograd.grad((y.exp() * y).sum(), (x, w), create_graph=True)
        torch.stack([grad.pow(2).sum() for grad in grads]).sum().backward()


@scenario(tags=("higher-order", "complex"))
def second_derivative_of_complex_numbers(p: Probe) -> None:
    """Complex leaves: conjugations in the first gradient are differentiated too."""
    w = p.leaf("w", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    with p.backward():
        (grad,) = torch.autograd.grad((w * w.conj() * w.exp()).abs().sum(), w, create_graph=True)
        grad.abs().pow(2).sum().backward()


@scenario(tags=("higher-order", "shapes"))
def second_derivative_at_several_sizes(p: Probe) -> None:
    """A penalty on input gradients over batches of five sizes, zero and one among them."""
    w = p.leaf("w", p.randn(3, 2, requires_grad=True))
    for rows in (4, 5, 1, 0, 7):
        x = p.randn(rows, 3, requires_grad=True)
        with p.backward():
            (grad,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
            grad.pow(2).sum().backward()
        p.value(f"rows{rows}", (grad.detach(), x.grad))


@scenario(tags=("higher-order", "convolution"))
def penalty_on_a_convolutional_critic(p: Probe) -> None:
    """Convolution, batch normalisation and pooling under a penalty on the gradient of the image."""
    critic = p.module(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    image = p.leaf("image", p.randn(2, 1, 5, 5, requires_grad=True))
    with p.backward():
        score = critic(image)
        (grad,) = torch.autograd.grad(score.sum() + score.pow(2).sum(), image, create_graph=True)
        (grad.flatten(1).norm(dim=1) - 1).pow(2).mean().backward()


@scenario(tags=("higher-order", "random"))
def dropout_mask_of_both_derivatives(p: Probe) -> None:
    """The second derivative uses the mask of the forward."""
    x = p.leaf("x", p.randn(20, requires_grad=True))
    torch.manual_seed(3)
    y = functional.dropout(x.exp(), 0.5).pow(2).sum()
    with p.backward():
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.sum().backward()
    p.value("first", grad)


@scenario(tags=("higher-order", "retain-graph"))
def one_gradient_graph_three_backwards(p: Probe) -> None:
    """With `retain_graph` a gradient's graph serves several backwards, of parts and of the whole."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xy")
    with p.backward():
        gx, gy = torch.autograd.grad((x.exp() * y.sin()).sum(), (x, y), create_graph=True)
        gx.sum().backward(retain_graph=True)
        gy.sum().backward(retain_graph=True)
        (gx * gy).sum().backward()


@scenario(tags=("higher-order", "undefined"))
def intermediates_that_depend_on_one_another(p: Probe) -> None:
    """Gradients of intermediates of which one is computed from another, differentiated further."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    a = x.exp()
    b = a * x
    with p.backward():
        grads = torch.autograd.grad((a * b * x).sum(), (a, b, x), create_graph=True)
        p.value("first", grads)
        torch.stack([(grad * grad).sum() for grad in grads]).sum().backward()
