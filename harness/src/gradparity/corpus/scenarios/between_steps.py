"""Programs whose graph keeps its shape from step to step, while something else changes.

In: a probe. Out: gradients of every step, in which nothing of the step before may linger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe


@scenario(tags=("steps", "layout"))
def strides_change_between_steps(p: Probe) -> None:
    """The same sizes in three layouts: the gradient's layout follows the leaf's in each step."""
    makers: list[Callable[[], Tensor]] = [
        lambda: p.randn(4, 4),
        lambda: p.randn(4, 4).t(),
        lambda: p.randn(4, 8)[:, ::2],
    ]
    for i, make in enumerate(makers):
        x = p.leaf(f"x{i}", make().requires_grad_())
        w = p.leaf(f"w{i}", p.randn(4, 4).t().requires_grad_())
        with p.backward():
            (x.sin() @ w).exp().sum().backward()


@scenario(tags=("steps", "dtype"), fp64=False)
def dtypes_change_between_steps(p: Probe) -> None:
    """The same graph in float32, float64, bfloat16 and float32 again."""
    for i, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float32)):
        x = p.leaf(f"x{i}", p.randn(4).to(dtype).requires_grad_())
        y = x.sin()
        y.register_hook(p.hook(f"y{i}"))
        with p.backward():
            (y * x).sum().backward()


@scenario(tags=("steps",))
def numbers_change_between_steps(p: Probe) -> None:
    """The same graph with another Python number in every step."""
    x = p.leaf("x", p.rand(4, requires_grad=True))
    for factor in (2.0, 0.5, 0.0, 1.0, 2.25):
        with p.backward():
            ((x * factor).pow(factor) + x.clamp(max=factor / 4)).sum().backward()
        p.value(f"grad{factor}", x.grad)


@scenario(tags=("steps",))
def dimensions_change_between_steps(p: Probe) -> None:
    """The same graph on a cube, summed, sorted and transposed along another dimension in every step."""
    x = p.leaf("x", p.randn(3, 3, 3, requires_grad=True))
    for dim in (0, 1, 2, 0):
        with p.backward():
            ordered = x.softmax(dim).transpose(dim, 1).cumsum(dim)
            (ordered.sort(dim).values * p.randn(3, 3, 3)).sum(dim).exp().sum().backward()
        p.value(f"grad{dim}", x.grad)


@scenario(tags=("steps", "aliasing"))
def operands_become_the_same_tensor(p: Probe) -> None:
    """Two operands that are different tensors, then one and the same, then overlapping views."""
    base = p.leaf("base", p.randn(6, requires_grad=True))
    other = p.leaf("other", p.randn(4, requires_grad=True))
    for left, right in ((base[:4], other), (other, other), (base[:4], base[2:]), (base[2:], other)):
        with p.backward():
            (left * right).sin().sum().backward()


@scenario(tags=("steps", "hooks"))
def another_hook_every_step(p: Probe) -> None:
    """A new function as hook on the same place of the same graph in every step."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for i in range(4):
        y = x.sin()
        y.register_hook(p.hook(f"step{i}", lambda g, i=i: g * (i + 1)))
        with p.backward():
            y.exp().sum().backward()


@scenario(tags=("steps", "hooks"))
def number_of_hooks_changes(p: Probe) -> None:
    """No hook, two hooks, one hook, three hooks on the same tensor of the same graph."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for step, count in enumerate((0, 2, 1, 3)):
        y = x.sin()
        for i in range(count):
            y.register_hook(p.hook(f"step{step}.hook{i}", lambda g: g * 2))
        with p.backward():
            y.exp().sum().backward()


class Scale(torch.autograd.Function):
    """Multiply by a number and a power that are no tensors."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float, options: dict[str, int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor, ctx.power = factor, options["power"]
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * x**ctx.power, None, None


@scenario(tags=("steps", "function"))
def function_arguments_change_between_steps(p: Probe) -> None:
    """A Function with other non-tensor arguments in every step."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    for factor, power in ((1.0, 1), (2.0, 1), (2.0, 3), (0.5, 0)):
        with p.backward():
            Scale.apply(x.sin(), factor, {"power": power}).sum().backward()


@scenario(tags=("steps", "saved"))
def unpacked_shape_changes_with_the_step(p: Probe) -> None:
    """The sizes that unpack hooks hand out change together with the batch."""
    weight = p.leaf("weight", p.randn(3, 2, requires_grad=True))
    for batch in (2, 5, 3):
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1.5):
            out = (p.randn(batch, 3) @ weight).tanh()
        with p.backward():
            out.sum().backward()
        p.value(f"grad{batch}", weight.grad)


@scenario(tags=("steps", "accumulation"))
def existing_grads_change_between_steps(p: Probe) -> None:
    """`.grad` is absent, present, of another layout, and absent again."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    for i, given in enumerate((None, p.randn(3, 4), p.randn(4, 3).t(), None)):
        x.grad = given
        with p.backward():
            (x.sin() * p.randn(3, 4)).sum().backward()
        p.value(f"grad{i}", x.grad)
        p.event("same_object", given is not None and x.grad is given)


@scenario(tags=("steps", "roots"))
def other_leaves_are_asked_for(p: Probe) -> None:
    """One graph, retained, differentiated by other inputs in every call."""
    leaves = [p.leaf(f"x{i}", p.randn(3, requires_grad=True)) for i in range(3)]
    loss = (leaves[0].sin() * leaves[1] * leaves[2].exp()).sum()
    with p.backward():
        for wanted in ((0,), (1, 2), (2, 0), (0, 1, 2)):
            grads = torch.autograd.grad(loss, [leaves[i] for i in wanted], retain_graph=True)
            p.value("".join(map(str, wanted)), grads)
        loss.backward(inputs=[leaves[1]])


@scenario(tags=("steps", "training"))
def training_with_clipping_and_momentum(p: Probe) -> None:
    """Five steps of an ordinary loop: clipping, momentum, a schedule, two accumulations a step."""
    model = p.module(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(p.randn(6, 4)), p.randint(3, 6)) / 2
            with p.backward():
                loss.backward()
            p.value("loss", loss.detach())
        p.value("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False))
        optimizer.step()
        schedule.step()
    p.value("weights", tuple(param.detach() for param in model.parameters()))


@scenario(tags=("steps", "shared"))
def recurrent_cell_of_several_lengths(p: Probe) -> None:
    """A cell that is applied as often as the sequence is long, for sequences of three lengths."""
    cell = p.module(nn.GRUCell(2, 3))
    for length in (3, 5, 2):
        state = torch.zeros(1, 3, dtype=p.dtype, device=p.device)
        for _ in range(length):
            state = cell(p.randn(1, 2), state)
        state.register_hook(p.hook(f"state{length}"))
        with p.backward():
            state.pow(2).sum().backward()
        p.value(f"grad{length}", cell.weight_hh.grad)


@scenario(tags=("steps", "order"))
def deep_chain(p: Probe) -> None:
    """Two hundred operations in a row, twice, with a hook in the middle."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    for _ in range(2):
        h = x
        for i in range(100):
            h = h.sin() + x
            if i == 50:
                h.register_hook(p.hook("middle"))
        with p.backward():
            h.sum().backward()


@scenario(tags=("steps",))
def scale_of_a_product_changes_between_steps(p: Probe) -> None:
    """A node with three gradients has another number in each step, and other nodes before and behind it."""
    x = p.leaf("x", p.randn(4, 4, requires_grad=True))
    for i, alpha in enumerate((0.5, 1.5, -2.0, 0.25)):
        inner = x.sin()
        inner.register_hook(p.hook(f"inner{i}"))
        product = torch.addmm(inner, x.cos(), inner, alpha=alpha, beta=alpha / 2)
        product.register_hook(p.hook(f"product{i}"))
        with p.backward():
            (product.tanh() * x).sum().backward()


@scenario(tags=("steps", "dtype"), fp64=False)
def grouped_products_whose_fake_kernel_refuses_float32(p: Probe) -> None:
    """Eager multiplies groups of rows in float32, and its nodes cannot be traced; what is around them can."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    x = p.leaf("x", p.randn(8, 8, requires_grad=True))
    weights = [p.leaf(f"w{i}", p.randn(2, 8, 8, requires_grad=True)) for i in range(2)]
    for i in range(3):
        y = x
        for weight in weights:
            y = torch._grouped_mm(y.sin().exp(), weight, ends.to(x.device)).tanh()
        y.register_hook(p.hook(f"y{i}"))
        with p.backward():
            (y * x).sum().backward()


@scenario(tags=("steps", "dtype"), fp64=False)
def half_of_a_grouped_product_is_frozen_between_steps(p: Probe) -> None:
    """A node that cannot be traced is asked for one of its two gradients, for both, and for the other."""
    ends = torch.tensor([4, 8], dtype=torch.int32)
    x = p.leaf("x", p.randn(8, 8, requires_grad=True))
    w = p.leaf("w", p.randn(2, 8, 8, requires_grad=True))
    for wanted in ((True, False), (True, True), (False, True), (True, True)):
        rows, weight = (t if wants else t.detach() for t, wants in zip((x, w), wanted, strict=True))
        with p.backward():
            (torch._grouped_mm(rows.sin(), weight.exp(), ends.to(x.device)).tanh() + rows).sum().backward()


@scenario(tags=("steps",))
def gradient_of_another_dtype_for_an_optimizer(p: Probe) -> None:
    """An optimizer that was compiled for gradients of one dtype gets those of another."""
    model = p.module(nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(backward: Callable[[Tensor], None], x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        backward(loss)
        optimizer.step()
        return loss.detach()

    run, weight = p.training_step(whole), model.weight
    for i in range(4):
        if i == 2:
            weight.grad_dtype = torch.float64 if weight.dtype is torch.float32 else torch.float32
        p.value(f"loss {i}", run(p.randn(4, 3)))
        p.value(f"weight {i}", weight.detach())
        model.zero_grad(set_to_none=True)


@scenario(tags=("steps", "low-precision"), fp64=False)
def model_of_another_dtype_for_an_optimizer(p: Probe) -> None:
    """The parameters themselves change their dtype in place, and their gradients with them."""
    model = p.module(nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(backward: Callable[[Tensor], None], x: Tensor) -> None:
        backward(model(x).square().sum())
        optimizer.step()

    run, x = p.training_step(whole), p.randn(4, 3)
    for dtype in (x.dtype, x.dtype, torch.bfloat16, torch.bfloat16):
        model.to(dtype)
        run(x.to(dtype))
        p.value("weight", model.weight.detach())
        model.zero_grad(set_to_none=True)


@scenario(tags=("steps", "layout"))
def gradient_of_another_layout_for_an_optimizer(p: Probe) -> None:
    """A gradient that is set between the backward and the step lies otherwise than those before."""
    model = p.module(nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def whole(backward: Callable[[Tensor], None], grad: Tensor) -> None:
        model.weight.grad = grad
        optimizer.step()

    run = p.training_step(whole)
    for i in range(5):
        grad = p.randn(2, 3)
        run(grad if i < 2 else grad.t().contiguous().t() if i < 4 else grad[:1].expand(2, 3))
        p.value(f"weight {i}", model.weight.detach())
