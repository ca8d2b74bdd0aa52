"""A compiled forward whose graph is used again: twice, by higher orders, or after changes in place.

In: a probe, whose `compile` is the identity for eager. Out: gradients, or eager's own exceptions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("compiled", "higher-order"), issue="pytorch#91469")
def double_backward_of_a_compiled_function(p: Probe) -> None:
    """The gradient of a compiled function can be differentiated again."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a.sin() * a)(x)
    with p.backward():
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.pow(2).sum().backward()


@scenario(tags=("compiled", "higher-order"), issue="pytorch#91469")
def hessian_vector_product_of_a_compiled_function(p: Probe) -> None:
    """A Hessian-vector product through a compiled loss."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    v = p.randn(4)
    loss = p.compile(lambda a: (a.exp() * a.sum()).sum())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        p.value("hvp", torch.autograd.grad(grad @ v, x))


@scenario(tags=("compiled", "higher-order"), issue="pytorch#183603")
def compiled_gradient_penalty(p: Probe) -> None:
    """A critic with a penalty on its input gradient, with a compiled forward."""
    critic = p.module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = p.leaf("x", p.randn(5, 3, requires_grad=True))
    score = p.compile(critic)(x)
    with p.backward():
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + (grad.norm(dim=1) - 1).pow(2).mean()).backward()


@scenario(tags=("compiled", "higher-order", "layout"))
def compiled_penalty_on_a_row_and_a_column(p: Probe) -> None:
    """Both derivatives are added where a weight is transposed, which decides the strides of its gradient."""
    row, column = (p.leaf(f"{sizes}", p.randn(*sizes, requires_grad=True)) for sizes in ((1, 3), (3, 1)))
    run = p.compile(lambda a: functional.linear(functional.linear(a, row), column).tanh())
    x = p.leaf("x", p.randn(5, 3, requires_grad=True))
    for _ in range(2):
        value = run(x)
        with p.backward():
            (grad,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            (value.sum() + grad.square().sum()).backward()


@scenario(tags=("compiled", "higher-order"))
def compiled_penalty_through_two_regions(p: Probe) -> None:
    """Second derivatives through one output are added to the first, also below another output."""
    w, x = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "wx")

    def twofold(a: Tensor) -> tuple[Tensor, Tensor]:
        first = (a.expand(2, 3, 3) @ w.sin()).tanh()
        return first + 1, (first * w.expand(2, 3, 3)).exp() + 1

    for inputs in ([x], [w, x]):
        _, second = p.compile(twofold)(x)
        with p.backward():
            grads = torch.autograd.grad(second.cos().sum(), inputs, create_graph=True)
            (second.sum() + torch.stack([g.square().sum() for g in grads]).sum()).backward()


@scenario(tags=("compiled", "retain-graph"))
def compiled_graph_retained(p: Probe) -> None:
    """A retained graph of a compiled function gives the same gradient three times."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a.sin() * a.exp())(x)
    with p.backward():
        for i in range(3):
            p.value(f"grad{i}", torch.autograd.grad(y.sum(), x, retain_graph=True))


@scenario(tags=("compiled", "retain-graph"))
def retained_after_ordinary_steps(p: Probe) -> None:
    """The weighting of two losses by their gradients' norms, in a network that first made ordinary steps."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    run = p.compile(model)
    for _ in range(2):
        loss = run(p.randn(3, 4)).pow(2).mean()
        with p.backward():
            loss.backward()
    out = run(p.randn(3, 4))
    first, second = out[:, 0].pow(2).mean(), out[:, 1].abs().mean()
    last = model[2].weight
    with p.backward():
        norms = [torch.autograd.grad(part, last, retain_graph=True)[0].norm() for part in (first, second)]
        p.value("ratio", norms[0] / norms[1])
        (first + second * (norms[0] / norms[1])).backward()


@scenario(tags=("compiled", "in-place", "errors"), issue="pytorch#197887")
def input_buffer_reused_before_backward(p: Probe) -> None:
    """When an input that was saved is overwritten before backward, backward is a RuntimeError."""
    w = p.leaf("w", p.randn(3, 3, requires_grad=True))
    buffer = p.randn(2, 3)
    out = p.compile(lambda b, a: (b @ a).sin())(buffer, w)
    buffer.copy_(p.randn(2, 3))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "in-place"), issue="pytorch#197039")
def constant_changed_between_forward_and_backward(p: Probe) -> None:
    """A buffer of which only the exponential was saved may change before backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    buffer = p.randn(3)
    out = p.compile(lambda a, b: a.sin() * b.exp())(x, buffer)
    buffer.zero_()
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "in-place", "errors"), issue="pytorch#185497")
def saved_result_changed_in_place(p: Probe) -> None:
    """A result that its own ReLU saved must not be changed in place before backward: a RuntimeError."""
    image = p.leaf("image", p.rand(1, 1, 4, 4, requires_grad=True))
    shift = p.leaf("shift", p.tensor(-0.3, requires_grad=True))

    def run(a: Tensor, b: Tensor) -> Tensor:
        return functional.interpolate(a + b, scale_factor=2.0, mode="bilinear").relu_()

    larger = p.compile(run)(image, shift)
    larger.add_(1)
    with p.backward():
        larger.pow(2).sum().backward()


@scenario(tags=("compiled", "in-place"), issue="pytorch#185497")
def in_place_after_interpolate(p: Probe) -> None:
    """The result of an interpolation is not saved by it, so it may be changed in place afterwards."""
    image = p.leaf("image", p.rand(1, 1, 4, 4, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        return functional.interpolate(a * 2, scale_factor=2.0, mode="bilinear", align_corners=False)

    larger = p.compile(run)(image)
    larger.mul_(0.5)
    with p.backward():
        larger.pow(2).sum().backward()


@scenario(tags=("compiled", "in-place"), issue="pytorch#185497")
def input_changed_after_interpolate(p: Probe) -> None:
    """The input of an interpolation is not saved either, only its size."""
    image = p.leaf("image", p.rand(1, 1, 4, 4, requires_grad=True))
    scaled = image * 3
    larger = p.compile(lambda a: functional.interpolate(a, scale_factor=2.0, mode="bilinear"))(scaled)
    scaled.detach().zero_()
    with p.backward():
        (larger * p.rand(1, 1, 8, 8)).sum().backward()


@scenario(tags=("compiled", "in-place"))
def compiled_function_changes_its_input(p: Probe) -> None:
    """A compiled function that changes its input in place leaves the right value and gradient behind."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a.mul_(2)
        return a.sin()

    y = x * 1
    out = p.compile(run)(y)
    p.value("changed", y.detach())
    with p.backward():
        (out + y).sum().backward()


@scenario(tags=("compiled", "shapes"))
def compiled_batch_size_changes(p: Probe) -> None:
    """Four batch sizes in a row through one compiled network."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))
    run = p.compile(model)
    for batch in (4, 7, 1, 5):
        out = run(p.randn(batch, 3))
        with p.backward():
            out.pow(2).mean().backward()
        p.value(f"grad{batch}", model[0].weight.grad)


@scenario(tags=("compiled", "layout"))
def compiled_gradients_of_other_layouts(p: Probe) -> None:
    """Root gradients that arrive transposed or expanded give `.grad` in the leaf's layout."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    y = p.compile(lambda a: a.sin() * 2)(x)
    with p.backward():
        y.backward(p.randn(4, 3).t(), retain_graph=True)
        y.backward(p.randn(3, 1).expand(3, 4))


@scenario(tags=("compiled", "islands"))
def parameter_frozen_after_compiling(p: Probe) -> None:
    """A parameter that is frozen after the first compiled step gets no gradient in the second."""
    model = p.module(nn.Linear(3, 2))
    run = p.compile(model)
    for step in range(2):
        model.weight.requires_grad_(step == 0)
        model.zero_grad()
        loss = run(p.randn(4, 3)).pow(2).sum()
        with p.backward():
            loss.backward()
        p.value(f"weight{step}", model.weight.grad)
