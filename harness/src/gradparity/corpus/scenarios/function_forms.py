"""Forms of custom Functions beyond the plain one: flags set elsewhere, rules of their own, custom operators.

In: a probe. Out: what backward is given, what becomes of what it returns, and its side effects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _leave_undefined(ctx: Any) -> None:
    """A helper that switches materialisation off."""
    getattr(ctx, "set_materialize_grads")(False)  # noqa: B009


class Pair(Function):
    """Two outputs; a helper decides that undefined gradients stay None."""

    @staticmethod
    def forward(ctx: Any, record: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        _leave_undefined(ctx)
        ctx.record = record
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[None, Tensor | None]:
        ctx.record(first, second)
        return None, None if first is None else first * 2


class Vanish(Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@scenario(tags=("function", "undefined"))
def undefined_gradient_for_a_helper_that_wants_none(p: Probe) -> None:
    """Who called `set_materialize_grads(False)` does not matter: a None that turns up late stays None."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, second = Pair.apply(p.hook("grads", kind="function"), x)
    with p.backward():
        (first.sum() + Vanish.apply(second).sum()).backward()


class Mentions(Function):
    """Mentions `set_materialize_grads`, but to keep it on."""

    @staticmethod
    def forward(ctx: Any, record: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(True)
        ctx.record = record
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        ctx.record(first, second)
        return None, first * 2 + second


@scenario(tags=("function", "undefined"))
def undefined_gradient_for_a_function_that_wants_zeros(p: Probe) -> None:
    """A None that turns up late becomes zeros of the output's shape and dtype."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, second = Mentions.apply(p.hook("grads", kind="function"), x)
    with p.backward():
        (first.sum() + Vanish.apply(second).sum()).backward()


class ManyKinds(Function):
    """Outputs of every kind: a float, an index, a mask, None, a number, a float without gradient."""

    @staticmethod
    def forward(ctx: Any, record: Any, x: Tensor) -> tuple[Any, ...]:
        ctx.record = record
        constant = x.detach().double().sum()
        ctx.mark_non_differentiable(constant)
        return x * 2, x.argsort(), x > 0, None, 7, constant

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        ctx.record(*grads)
        return None, grads[0] * 2


@scenario(tags=("function", "undefined"))
def outputs_of_every_kind(p: Probe) -> None:
    """What backward gets for outputs without gradient: zeros of their dtype and shape, None for no tensor."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    outputs = ManyKinds.apply(p.hook("grads", kind="function"), x)
    p.event("outputs", *outputs)
    with p.backward():
        outputs[0].sum().backward()


@scenario(tags=("function", "undefined", "shapes"))
def zeros_of_changing_shape(p: Probe) -> None:
    """The zeros for an unused output have that output's shape in every step."""
    record = p.hook("grads", kind="function")
    for rows in (2, 3, 4):
        x = p.leaf(f"x{rows}", p.randn(rows, 2, requires_grad=True))
        first, _ = Mentions.apply(record, x)
        with p.backward():
            first.sum().backward()


class Scale(Function):
    """With rules for vmap and forward mode besides its backward."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * ctx.factor

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, factor: float) -> tuple[Tensor, int]:
        return Scale.apply(x, factor), in_dims[0]


class Generated(Function):
    """Asks torch to make its vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@scenario(tags=("function", "functorch"))
def functions_with_rules_of_their_own(p: Probe) -> None:
    """Functions with `jvp`, `vmap` and a generated vmap rule: plain, under vmap, and with forward mode."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    plain = Generated.apply(Scale.apply(x, 3.0))
    mapped = torch.vmap(lambda row: Generated.apply(Scale.apply(row, 0.5)))(x)
    mapped.register_hook(p.hook("mapped"))
    with p.backward():
        (plain * mapped).sum().backward()


@scenario(tags=("function", "functorch"))
def function_under_func_grad(p: Probe) -> None:
    """`torch.func.grad` over a Function, whose result is differentiated once more by the engine."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    inner = torch.func.grad(lambda t: Generated.apply(t).pow(2).sum())(x)
    with p.backward():
        inner.sum().backward()


class Boxed(Function):
    """Takes its gradients as one list (where torch knows of it)."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        boxed = list(grads[0]) if isinstance(grads[0], list) else list(grads)
        return boxed[0] * 2, boxed[1] * 3


@scenario(tags=("function",))
def gradients_in_one_list(p: Probe) -> None:
    """A Function with `boxed_grads_call` gets its gradients in one list that it may empty."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    a, b = Boxed.apply(x, y)
    with p.backward():
        (a * b).sum().backward()


class Views(Function):
    """Returns a view of its input, and the input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), x.t()

    @staticmethod
    def backward(ctx: Any, flat: Tensor, turned: Tensor) -> Tensor:
        return (flat.view(2, 3) + turned.t()) * 2


@scenario(tags=("function", "aliasing"))
def function_outputs_that_are_views(p: Probe) -> None:
    """Outputs that are views of the input, read only."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    flat, turned = Views.apply(x.clone())
    with p.backward():
        (flat.sin().sum() + turned.cos().sum()).backward()


class Same(Function):
    """Returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


@scenario(tags=("function", "aliasing"))
def function_output_that_is_the_input(p: Probe) -> None:
    """A Function may return its input, which comes out as a view of it with a history of its own."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = x.clone()
    z = Same.apply(y)
    p.event("same", z is y, z._is_view())
    with p.backward():
        ((z * 2 + 1).pow(2) + y).sum().backward()


class DirtyView(Function):
    """Changes a view in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(4)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 4


@scenario(tags=("function", "in-place"))
def function_changes_a_view_in_place(p: Probe) -> None:
    """A Function that is dirty on a view becomes part of the history of the base."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    y = x.clone()
    DirtyView.apply(y[1])
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * y).sum().backward()


class Growing(Function):
    """Counts its backwards on ctx, deletes what it needs no more, and keeps the last gradient."""

    @staticmethod
    def forward(ctx: Any, record: Any, x: Tensor) -> Tensor:
        ctx.record, ctx.count, ctx.scratch = record, 0, [1]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        ctx.record(ctx.count, hasattr(ctx, "scratch"), getattr(ctx, "last", None))
        ctx.count += 1
        ctx.last = grad
        if hasattr(ctx, "scratch"):
            del ctx.scratch
        return None, grad * x * ctx.count


@scenario(tags=("function",))
def state_on_ctx_over_several_backwards(p: Probe) -> None:
    """Attributes that a backward sets, changes and deletes on ctx are found so by the next one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = Growing.apply(p.hook("state", kind="function"), x)
    with p.backward():
        for factor in (1.0, 2.0, 3.0):
            (y * factor).sum().backward(retain_graph=True)
    p.event("count", y.grad_fn.count)


class Introspective(Function):
    """Looks at its ctx as at an autograd node."""

    @staticmethod
    def forward(ctx: Any, record: Any, x: Tensor, flag: bool, y: Tensor) -> Tensor:
        ctx.record = record
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, Tensor]:
        ctx.record(
            ctx.needs_input_grad,
            ctx.name(),
            type(ctx).__name__,
            isinstance(ctx, Function),
            [node and node.name() for node, _ in ctx.next_functions],
            ctx.saved_tensors,
            torch.is_grad_enabled(),
            grad.requires_grad,
        )
        return None, grad, None, grad


@scenario(tags=("function",))
def function_looks_at_its_ctx(p: Probe) -> None:
    """What a backward can ask its ctx: what is needed, its name, its class, its neighbours."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        Introspective.apply(p.hook("ctx", kind="function"), x, True, p.randn(3)).sum().backward()


class OnceInside(Function):
    """Once differentiable, with autograd inside its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (result,) = torch.autograd.grad(inner.sin().sum(), inner)
        return result * grad


@scenario(tags=("function",))
def once_differentiable_with_autograd_inside(p: Probe) -> None:
    """`once_differentiable` runs backward without grad mode; autograd inside switches it on for itself."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = OnceInside.apply(x)
    y.register_hook(p.hook("y"))
    with p.backward():
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        p.event("requires_grad", first.requires_grad, first.grad_fn and first.grad_fn.name())
        y.sum().backward()
