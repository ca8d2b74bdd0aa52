"""Custom Functions inside functions compiled ahead, with everything that a Function may do.

In: a probe, whose `compile` is the identity for eager. Out: what the backwards get and give, and
eager's errors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.function_contracts import OnceOnly
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "function")


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass where the input is small."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.limit), None


@scenario(tags=TAGS)
def aot_straight_through(p: Probe) -> None:
    """A Function with a gradient that its forward does not have, and an argument that changes."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    call = p.compile(lambda a, limit: Straight.apply(a * 2, limit) * a)
    for step, limit in enumerate((1.0, 3.0, 1.0)):
        with p.backward():
            call(x, limit).sum().backward()
        p.value(f"grad{step}", x.grad)


class Reports(torch.autograd.Function):
    """Says which of its inputs need gradients, in the gradients that it gives."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first, second = ctx.needs_input_grad
        return grad * (2 if second else 3) if first else None, grad * (5 if first else 7) if second else None


@scenario(tags=TAGS)
def aot_needs_input_grad(p: Probe) -> None:
    """`needs_input_grad` is that of each call."""
    call = p.compile(lambda a, b: Reports.apply(a, b))
    for step, (one, other) in enumerate(((True, True), (True, False), (False, True), (True, True))):
        a = p.leaf(f"a{step}", p.randn(2, requires_grad=one))
        b = p.leaf(f"b{step}", p.randn(2, requires_grad=other))
        with p.backward():
            call(a, b).sum().backward()


class InPlace(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@scenario(tags=(*TAGS, "in-place"))
def aot_function_that_marks_its_input_dirty(p: Probe) -> None:
    """A Function that changes the caller's intermediate: it takes the Function's history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    h = x + 1
    out = p.compile(lambda a: InPlace.apply(a).sin())(h)
    p.value("h", h.detach())
    with p.backward():
        (out + h).sum().backward()


class TwoOutputs(torch.autograd.Function):
    """Sine and cosine; the gradient of an output that is not used is None."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if first is None and second is None:
            return None
        if second is None:
            return first * x.cos() + 10
        return -second * x.sin() + 20 if first is None else first * x.cos() - second * x.sin()


@scenario(tags=(*TAGS, "undefined"), issue="pytorch#118396")
def aot_function_with_two_outputs_in_every_use(p: Probe) -> None:
    """First output, second, both: the Function's backward gets None for what the loss does not use."""
    call = p.compile(lambda a: TwoOutputs.apply(a))
    for step, chosen in enumerate(((0,), (1,), (0, 1))):
        x = p.leaf(f"x{step}", p.randn(3, requires_grad=True))
        outs = call(x)
        with p.backward():
            sum(outs[number].sum() for number in chosen).backward()


@scenario(tags=(*TAGS, "higher-order", "errors"))
def aot_once_differentiable_function(p: Probe) -> None:
    """A Function that can be differentiated once: the second time is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: OnceOnly.apply(a).sum())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        p.value("first", grad.detach())
        grad.sum().backward()


class Raises(torch.autograd.Function):
    """Refuses large gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.abs().max() > 1:
            raise OverflowError("too steep")
        return grad


@scenario(tags=(*TAGS, "errors"))
def aot_function_whose_backward_raises(p: Probe) -> None:
    """An exception in a Function's backward, which depends on the gradient, comes out with its type."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda a: Raises.apply(a))
    with p.backward():
        call(x).sum().backward()
        p.event("sound")
        (call(x) * 3).sum().backward()


class SetupContext(torch.autograd.Function):
    """A power in the newer form, with what `setup_context` keeps."""

    @staticmethod
    def forward(x: Tensor, exponent: int) -> Tensor:
        return x**exponent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.exponent = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, output = ctx.saved_tensors
        return grad * ctx.exponent * output / x, None


@scenario(tags=(*TAGS, "higher-order"))
def aot_function_with_setup_context(p: Probe) -> None:
    """A Function in the newer form, differentiated twice."""
    x = p.leaf("x", p.rand(3, requires_grad=True))
    out = p.compile(lambda a: SetupContext.apply(a + 1, 3).sum())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.square().sum().backward()


class SavesAnIntermediate(torch.autograd.Function):
    """Saves what is neither input nor output, and what is no tensor at all."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, names: tuple[str, ...]) -> Tensor:
        inner = x.exp()
        ctx.save_for_backward(inner, None, inner + 1)
        ctx.names = names
        return inner / (inner + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        inner, nothing, shifted = ctx.saved_tensors
        assert nothing is None
        return grad * inner / shifted**2 * len(ctx.names), None


@scenario(tags=TAGS)
def aot_function_that_saves_an_intermediate(p: Probe) -> None:
    """Saved intermediates, a saved None, and a tuple of strings as argument."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        p.compile(lambda a: SavesAnIntermediate.apply(a.sin(), ("a", "b")))(x).sum().backward()


class BackwardInside(torch.autograd.Function):
    """Runs a backward of its own in its backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(again.sin(), again, grad)
        return inner


@scenario(tags=(*TAGS, "reentrant"))
def aot_function_with_a_backward_inside(p: Probe) -> None:
    """A Function that differentiates inside its own backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_hook(p.hook("x"))
    with p.backward():
        p.compile(lambda a: BackwardInside.apply(a * 2).exp())(x).sum().backward()


@scenario(tags=(*TAGS, "checkpoint"))
def aot_function_in_a_checkpoint(p: Probe) -> None:
    """A Function inside a checkpoint inside a compiled function."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        return checkpoint(lambda h: Straight.apply(h * 2, 1.5).sin(), a, use_reentrant=False) * a

    with p.backward():
        p.compile(run)(x).sum().backward()


@scenario(tags=(*TAGS, "func"), issue="pytorch#193279")
def aot_transforms_inside(p: Probe) -> None:
    """`torch.func.grad` and `vmap` inside a compiled function, differentiated from outside."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    slopes = torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))
    with p.backward():
        p.compile(lambda a: slopes(a).exp())(x).sum().backward()


@scenario(tags=(*TAGS, "higher-order"))
def aot_backward_inside_the_compiled_function(p: Probe) -> None:
    """A function whose result depends on a gradient that it computes inside, as forces of an energy do."""
    x, k = p.leaf("x", p.randn(3, requires_grad=True)), p.leaf("k", p.rand(3, requires_grad=True))

    def run(positions: Tensor, stiffness: Tensor) -> tuple[Tensor, Tensor]:
        energy = (stiffness * positions.square()).sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -force

    energy, force = p.compile(run)(x, k)
    with p.backward():
        (energy + force.square().sum()).backward()
