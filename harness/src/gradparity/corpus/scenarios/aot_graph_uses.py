"""Uses of the graph behind a function compiled ahead: in part, again, for intermediates, for second orders.

In: a probe, whose `compile` is the identity for eager. Out: gradients, None where nothing flows,
eager's errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot")


def _three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three outputs: of the first leaf, of the second and the first output, of the third alone."""
    first = a.sin()
    return first, (first * b).exp(), c.cos()


@scenario(tags=(*TAGS, "inputs"), issue="pytorch#131794")
def aot_every_subset_of_outputs(p: Probe) -> None:
    """Every choice of outputs in the loss gives gradients to exactly those leaves that it reaches."""
    call = p.compile(_three)
    for chosen in ("0", "1", "2", "01", "02", "12", "012"):
        leaves = [p.leaf(f"{chosen}{name}", p.randn(2, requires_grad=True)) for name in "abc"]
        outs = call(*leaves)
        with p.backward():
            torch.autograd.backward([outs[int(number)].sum() for number in chosen])


@scenario(tags=(*TAGS, "retain-graph"))
def aot_independent_outputs_one_after_the_other(p: Probe) -> None:
    """Outputs that share nothing are differentiated in three backwards, last one first."""
    leaves = [p.leaf(name, p.randn(2, requires_grad=True)) for name in "abc"]
    outs = p.compile(lambda a, b, c: (a.sin(), b.exp(), c.cos()))(*leaves)
    with p.backward():
        for number in (2, 0, 1):
            outs[number].sum().backward()
            p.value(f"after{number}", tuple(leaf.grad for leaf in leaves))


@scenario(tags=(*TAGS, "retain-graph", "errors"))
def aot_outputs_that_share_a_saved_tensor(p: Probe) -> None:
    """Outputs that share a node cannot be differentiated one after the other without `retain_graph`."""
    x = p.leaf("x", p.randn(2, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        shared = a.sin()
        return shared.exp(), shared.cos()

    one, two = p.compile(run)(x)
    with p.backward():
        one.sum().backward()
        p.event("first done")
        two.sum().backward()


@scenario(tags=(*TAGS, "retain-graph", "errors"))
def aot_second_backward_without_retain(p: Probe) -> None:
    """A second backward through a graph that was freed is a RuntimeError."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    out = p.compile(lambda a: a.sin())(x)
    with p.backward():
        out.sum().backward()
        out.sum().backward()


class Doubled(torch.autograd.Function):
    """Saves nothing, or what it does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        """Twice `x`."""
        if saves:
            ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Twice the gradient."""
        return grads[0] * 2, None


class KeptInContext(torch.autograd.Function):
    """Keeps its input or its result as an attribute, or asks for what was saved though nothing was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: str) -> Tensor:
        """The exponential of `x`."""
        out = x.exp()
        ctx.how, ctx.kept = kept, x if kept == "input" else out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of the exponential."""
        return grads[0] * (ctx.kept.exp() if ctx.how == "input" else ctx.kept), None


class AsksForSaved(KeptInContext):
    """Asks for what was saved though nothing was."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of the exponential."""
        return (*ctx.saved_tensors, grads[0] * ctx.kept, None)


def _saved_by(ctx: Any) -> Tensor:
    (saved,) = ctx.saved_tensors
    kept: Tensor = saved
    return kept


class AsksElsewhere(KeptInContext):
    """Reads what was saved in a function that is handed the context, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: str) -> Tensor:
        """The sine of `x`."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of the sine."""
        return grads[0] * _saved_by(ctx).cos(), None


#: what a function computes, of whose nodes some keep tensors in eager, and others nothing.
KEEPING = {
    "a number": lambda a: a * 3,
    "a number divided by": lambda a: a / 3,
    "a sum": lambda a: a + 1,
    "views": lambda a: a.view(2, 1).t().sum(),
    "a mean": lambda a: a.mean(),
    "a cast": lambda a: a.double(),
    "joined": lambda a: torch.cat([a, a]),
    "a mask": lambda a: torch.where(a > 0, a, 0.0),
    "itself": lambda a: a * a.detach(),
    "a constant": lambda a: a * torch.ones(2, device=a.device, dtype=a.dtype),
    "picked": lambda a: a[torch.tensor([1, 0], device=a.device)],
    "clamped": lambda a: a.clamp(min=-9),
    "a Function that saves": lambda a: Doubled.apply(a, True),
    "a Function that does not": lambda a: Doubled.apply(a, False),
    "nothing, then something": lambda a: (a + 1).exp(),
    "an attribute of a context": lambda a: KeptInContext.apply(a, "input"),
    "a result in a context": lambda a: KeptInContext.apply(a * 2, "result"),
    "a Function that asks in vain": lambda a: AsksForSaved.apply(a, "result"),
    "a Function that asks elsewhere": lambda a: AsksElsewhere.apply(a, ""),
}


@scenario(tags=(*TAGS, "retain-graph"))
def aot_what_can_run_backward_twice(p: Probe) -> None:
    """What keeps no tensor runs backward as often as one likes; the rest raises, though nothing is read."""
    for name, function in KEEPING.items():
        x = p.leaf(name, p.randn(2, requires_grad=True))
        out = p.compile(function)(x)
        for number in range(3):
            try:
                with p.backward():
                    out.sum().backward()
            except RuntimeError as error:
                p.event(f"{name} {number}", "a second time" in str(error))
        p.value(name, x.grad)


@scenario(tags=(*TAGS, "retain-graph", "mutation"))
def aot_what_a_context_keeps_is_read_as_it_is_now(p: Probe) -> None:
    """A tensor that is an attribute of a context has no version check, and is read when the backward runs."""
    x = p.leaf("x", p.randn(2, requires_grad=True))
    held = x * 1
    out = p.compile(lambda a: KeptInContext.apply(a, "input"))(held)
    for step in range(3):
        with p.backward():
            p.value(f"grad{step}", torch.autograd.grad(out.sum(), held))
        with torch.no_grad():
            held.mul_(2)


class GivesNothing(torch.autograd.Function):
    """Two results; its backward has no gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sine and cosine."""
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """None."""
        return None


class Product(torch.autograd.Function):
    """A product whose backward makes a gradient of whatever it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of the product, and one more."""
        x, y = ctx.saved_tensors
        return grads[0] * y + 1, grads[0] * x


class ProductUnlessMissing(Product):
    """A product that is told that a gradient is missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """The product."""
        ctx.set_materialize_grads(False)
        return Product.forward(ctx, x, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of the product; ones where there is none."""
        x, y = ctx.saved_tensors
        return (torch.ones_like(x), None) if grads[0] is None else (grads[0] * y, grads[0] * x)


#: what stands between a Function that gives no gradient and the inputs; what is used besides.
MISSING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "next": lambda a, b: GivesNothing.apply(Product.apply(a, b))[0],
    "further": lambda a, b: GivesNothing.apply(Product.apply(a, b).exp().view(-1))[1],
    "told": lambda a, b: GivesNothing.apply(ProductUnlessMissing.apply(a, b))[0],
    "twice": lambda a, b: GivesNothing.apply(Product.apply(Product.apply(a, b), b))[1],
    "beside": lambda a, b: GivesNothing.apply(Product.apply(a, b))[0] + Product.apply(b, a),
    "met": lambda a, b: sum(GivesNothing.apply(c := Product.apply(a, b))) + c * 2,
    "leaf": lambda a, b: GivesNothing.apply(a)[0] * Product.apply(a, b),
    "outputs": lambda a, b: (GivesNothing.apply(c := Product.apply(a, b))[0], c.sin()),
    "only built-in": lambda a, b: GivesNothing.apply(a.exp() * b)[0],
}


@scenario(tags=(*TAGS, "function", "undefined"))
def aot_functions_below_one_that_gives_no_gradient(p: Probe) -> None:
    """A Function that gets no gradient gets zeros, and is called; what is built in is not."""
    for name, function in MISSING.items():
        a, b = (p.leaf(f"{name} {which}", p.randn(3, requires_grad=True)) for which in "ab")
        out = p.compile(function)(a * 1 if name == "further" else a, b)
        first = out[0] if isinstance(out, tuple) else out
        with p.backward():
            first.sum().backward()
        p.value(name, (a.grad, b.grad))


@scenario(tags=(*TAGS, "retain-graph"))
def aot_graph_kept_by_part(p: Probe) -> None:
    """A kept graph is differentiated by one output, by the other, by both, and then freed."""
    leaves = [p.leaf(name, p.randn(2, requires_grad=True)) for name in "abc"]
    one, two, three = p.compile(_three)(*leaves)
    with p.backward():
        for step, roots in enumerate(((one,), (two,), (three, one), (two, one, three))):
            torch.autograd.backward([root.sum() for root in roots], retain_graph=step < 3)
            p.value(f"step{step}", tuple(leaf.grad for leaf in leaves))


@scenario(tags=(*TAGS, "inputs"))
def aot_unused_input_allowed(p: Probe) -> None:
    """With `allow_unused` an input of the function that its used output does not depend on gets None."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in "xy")
    one, _ = p.compile(lambda a, b: (a.sin(), b.exp()))(x, y)
    with p.backward():
        p.value("grads", torch.autograd.grad(one.sum(), [x, y], allow_unused=True))


@scenario(tags=(*TAGS, "inputs", "errors"))
def aot_unused_input_refused(p: Probe) -> None:
    """Without it, that is a RuntimeError."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in "xy")
    one, _ = p.compile(lambda a, b: (a.sin(), b.exp()))(x, y)
    with p.backward():
        torch.autograd.grad(one.sum(), [x, y])


@scenario(tags=(*TAGS, "inputs"))
def aot_unused_inputs_as_zeros(p: Probe) -> None:
    """With `materialize_grads` it gets zeros."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in "xy")
    one, _ = p.compile(lambda a, b: (a.sin(), b.exp()))(x, y)
    with p.backward():
        p.value("grads", torch.autograd.grad(one.sum(), [x, y], materialize_grads=True))


@scenario(tags=(*TAGS, "inputs"))
def aot_argument_that_the_function_ignores(p: Probe) -> None:
    """An argument that nothing is computed from has no gradient, with or without others."""
    x, y = (p.leaf(name, p.randn(2, requires_grad=True)) for name in "xy")
    out = p.compile(lambda a, b: a.sin())(x, y)
    with p.backward():
        p.value("grads", torch.autograd.grad(out.sum(), [x, y], allow_unused=True, retain_graph=True))
        out.sum().backward()


@scenario(tags=(*TAGS, "inputs", "hooks"), issue="pytorch#132929")
def aot_gradients_of_all_returned_intermediates(p: Probe) -> None:
    """A network that returns every layer's result can be differentiated by each of them."""
    layers = [p.module(nn.Linear(3, 3), f"layer{i}") for i in range(3)]

    def run(x: Tensor) -> list[Tensor]:
        results = []
        for layer in layers:
            x = layer(x).tanh()
            results.append(x)
        return results

    results = p.compile(run)(p.randn(2, 3))
    for number, result in enumerate(results):
        result.register_hook(p.hook(f"result{number}"))
    with p.backward():
        p.value("grads", torch.autograd.grad(results[-1].sum(), results[:-1], retain_graph=True))
        (results[-1].sum() + results[0].sum()).backward()


@scenario(tags=(*TAGS, "retain-grad"), issue="pytorch#91468")
def aot_retain_grad_on_all_outputs(p: Probe) -> None:
    """`retain_grad` on outputs that feed one another keeps the whole gradient of each."""
    leaves = [p.leaf(name, p.randn(2, requires_grad=True)) for name in "abc"]
    outs = p.compile(_three)(*leaves)
    for out in outs:
        out.retain_grad()
    with p.backward():
        (outs[1] * outs[0]).sum().backward()
    p.value("grads", tuple(out.grad for out in outs))


@scenario(tags=(*TAGS, "higher-order"), issue="pytorch#91469")
def aot_third_derivative(p: Probe) -> None:
    """The gradient of the gradient of the gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: (a.sin() * a.exp()).sum())(x)
    with p.backward():
        for order in range(3):
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            p.value(f"order{order}", grad.detach())
            out = grad.sum()


@scenario(tags=(*TAGS, "higher-order"))
def aot_gradient_penalty_training(p: Probe) -> None:
    """Three steps with a penalty on the gradient of the input, through a compiled critic."""
    critic = p.module(nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)))
    run, optimizer = p.compile(critic), torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(3):
        x = p.randn(4, 3, requires_grad=True)
        score = run(x).sum()
        with p.backward():
            (grad,) = torch.autograd.grad(score, x, create_graph=True)
            loss = score + (grad.norm(dim=1) - 1).square().sum()
            optimizer.zero_grad()
            loss.backward()
        p.value(f"loss{step}", loss)
        optimizer.step()


@scenario(tags=(*TAGS, "higher-order"))
def aot_derivatives_of_derivatives_in_some_steps(p: Probe) -> None:
    """Ten steps with a second derivative, three without, and again one with, of one compiled function."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    run = p.compile(lambda a: (a.sin() * a).sum())
    for step in range(14):
        is_twice = step < 10 or step == 13
        with p.backward():
            (grad,) = torch.autograd.grad(run(x), x, create_graph=is_twice)
            p.value(f"first{step}", grad)
            if is_twice:
                p.value(f"second{step}", torch.autograd.grad(grad.sum(), x))


@scenario(tags=(*TAGS, "higher-order"))
def aot_hessian_row_by_row(p: Probe) -> None:
    """A Hessian, one row after the other, from a kept graph of second order."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    loss = p.compile(lambda a: (a.prod() * a.sin()).sum())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        rows = [torch.autograd.grad(part, x, retain_graph=True)[0] for part in grad]
    p.value("hessian", torch.stack(rows))


@scenario(tags=(*TAGS, "higher-order", "inputs"))
def aot_second_derivative_of_some_inputs(p: Probe) -> None:
    """Mixed second derivatives; where one does not depend on an input, `allow_unused` gives None."""
    x, y, z = (p.leaf(name, p.randn(2, requires_grad=True)) for name in "xyz")
    loss = p.compile(lambda a, b, c: (a.square() * b + c).sum())(x, y, z)
    with p.backward():
        first = torch.autograd.grad(loss, [x, y], create_graph=True)
        p.value("mixed", torch.autograd.grad(first[0].sum() + first[1].sum(), [x, y, z], allow_unused=True))


@scenario(tags=(*TAGS, "retain-graph"))
def aot_graph_outlives_its_inputs(p: Probe) -> None:
    """Of two calls one result is dropped unused; the other is used after its input went."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b: (a @ b).exp())
    kept = call(p.randn(2, 3), w)
    call(p.randn(2, 3), w)
    with p.backward():
        kept.sum().backward()


@scenario(tags=(*TAGS, "accumulation"))
def aot_accumulates_into_a_given_gradient(p: Probe) -> None:
    """A `.grad` that is there already is added to in place; one of another layout keeps its layout."""
    x, y = (p.leaf(name, p.randn(2, 3, requires_grad=True)) for name in "xy")
    x.grad, y.grad = p.randn(2, 3), p.randn(3, 2).t()
    before = x.grad
    with p.backward():
        p.compile(lambda a, b: (a * b).sin())(x, y).sum().backward()
    p.event("in place", x.grad is before, tuple(y.grad.stride()))
