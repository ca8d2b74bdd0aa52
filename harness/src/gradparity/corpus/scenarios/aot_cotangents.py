"""Gradients that arrive at the outputs of functions compiled ahead: other layouts, kinds, none at all.

In: a probe, whose `compile` is the identity for eager. Out: gradients and their layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "layout")


@scenario(tags=TAGS)
def aot_cotangents_of_five_layouts(p: Probe) -> None:
    """Contiguous, transposed, expanded, stepped and offset gradients for one kept graph."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    y = p.compile(lambda a: (a.sin() * a).t().contiguous())(x)
    layouts = (
        p.randn(4, 3),
        p.randn(3, 4).t(),
        p.randn(4, 1).expand(4, 3),
        p.randn(4, 6)[:, ::2],
        p.randn(5, 3)[1:],
    )
    with p.backward():
        for number, cotangent in enumerate(layouts):
            p.value(f"grad{number}", torch.autograd.grad(y, x, cotangent, retain_graph=True))


@scenario(tags=TAGS)
def aot_layout_changes_from_step_to_step(p: Probe) -> None:
    """What follows the compiled part hands back another layout in every step."""
    w = p.leaf("w", p.randn(4, 3, requires_grad=True))
    run = p.compile(lambda a, b: (a @ b).tanh())
    uses = (
        lambda h: h.sum(),
        lambda h: (h.t() @ h).sum(),
        lambda h: h[:, 1].square().sum(),
        lambda h: h.mean(0).exp().sum(),
    )
    for step, use in enumerate(uses):
        with p.backward():
            use(run(p.randn(2, 4), w)).backward()
        p.value(f"grad{step}", w.grad)


@scenario(tags=TAGS)
def aot_cotangent_in_channels_last(p: Probe) -> None:
    """An image's gradient arrives in channels-last where the output was contiguous, and the reverse."""
    conv = p.module(nn.Conv2d(2, 3, 3))
    run, x = p.compile(conv), p.leaf("x", p.randn(1, 2, 5, 5, requires_grad=True))
    for step in range(2):
        out = run(x)
        cotangent = p.randn(1, 3, 3, 3)
        with p.backward():
            out.backward(cotangent.to(memory_format=torch.channels_last) if step else cotangent)
        p.value(f"grads{step}", (x.grad, conv.weight.grad))


@scenario(tags=TAGS)
def aot_cotangent_that_the_caller_keeps(p: Probe) -> None:
    """The gradient that was passed belongs to the caller: it is not changed, nor shared with `.grad`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a * 1)(x)
    cotangent = p.randn(3)
    with p.backward():
        y.backward(cotangent)
    p.event("shared", x.grad.data_ptr() == cotangent.data_ptr())
    x.grad.mul_(5)
    p.value("cotangent", cotangent)


@scenario(tags=(*TAGS, "views"))
def aot_gradient_of_a_sum_is_expanded(p: Probe) -> None:
    """`autograd.grad` through a sum gives what eager gives, strides included."""
    x, y = (p.leaf(name, p.randn(2, 3, requires_grad=True)) for name in "xy")
    out = p.compile(lambda a, b: a.sum() + b.t().sum(0).sum())(x, y)
    with p.backward():
        grads = torch.autograd.grad(out, [x, y])
    p.value("grads", grads)
    p.event("strides", *(tuple(grad.stride()) for grad in grads))


@scenario(tags=(*TAGS, "higher-order"))
def aot_cotangent_with_history(p: Probe) -> None:
    """A cotangent that requires grad itself: the gradient depends on it, and can be differentiated by it."""
    x, v = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xv")
    y = p.compile(lambda a: a.exp())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(y, x, v, create_graph=True)
        p.value("jvp", torch.autograd.grad(grad, v, p.randn(3), retain_graph=True))
        grad.sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_cotangent_of_another_shape(p: Probe) -> None:
    """A gradient whose shape is not that of the output is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a.exp())(x)
    with p.backward():
        y.backward(p.randn(4))


@scenario(tags=(*TAGS, "dtype"), fp64=False)
def aot_cotangent_of_another_dtype(p: Probe) -> None:
    """Behind a change of dtype, gradients come back in the dtype of the output."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    run = p.compile(lambda a: (a * 2).sin())
    for step, dtype in enumerate((torch.float64, torch.bfloat16, torch.float32)):
        with p.backward():
            run(x).to(dtype).square().sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=(*TAGS, "batched"))
def aot_batched_cotangents(p: Probe) -> None:
    """A whole Jacobian in one call, with `is_grads_batched`."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.compile(lambda a: a.sin() * a.sum())(x)
    rows = torch.eye(3, dtype=p.dtype, device=p.device)
    with p.backward():
        p.value("jacobian", torch.autograd.grad(y, x, rows, is_grads_batched=True, retain_graph=True))
        y.sum().backward()


@scenario(tags=(*TAGS, "undefined"))
def aot_no_gradient_arrives(p: Probe) -> None:
    """A Function above that gives no gradient: nothing flows into the compiled part, `.grad` stays None."""

    class Stops(torch.autograd.Function):
        """A copy without a gradient for its first argument."""

        @staticmethod
        def forward(ctx: object, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[None, Tensor]:
            return None, grad

    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xy")
    one, other = p.compile(lambda a, b: (a.sin(), b.exp()))(x, y)
    with p.backward():
        Stops.apply(one, other).sum().backward()


@scenario(tags=TAGS)
def aot_conjugated_cotangent_of_a_closure(p: Probe) -> None:
    """A lazily conjugated cotangent comes to a function that uses a tensor which it was not given."""
    w = p.leaf("w", p.randn(4, 2, requires_grad=True))
    x = p.randn(4, 2)
    out = p.compile(lambda x: torch.view_as_complex(w * x) * 2)(x)
    with p.backward():
        out.conj().real.pow(2).sum().backward()
        out = p.compile(lambda x: torch.view_as_complex(w.T.reshape(4, 2) * x) * 2)(x)
        out.backward(torch.ones_like(out).conj())


@scenario(tags=TAGS)
def aot_penalty_on_the_gradient_of_a_closure(p: Probe) -> None:
    """The second derivative reaches a tensor that the function was not given."""
    w, x = p.leaf("w", p.randn(4, requires_grad=True)), p.leaf("x", p.randn(4, requires_grad=True))
    inner = w * 2
    out = p.compile(lambda x: (inner.view(2, 2) * x.view(2, 2)).pow(2))(x)
    with p.backward():
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        grad.sum().backward()


@scenario(tags=TAGS)
def aot_inputs_that_no_gradient_reads_are_changed(p: Probe) -> None:
    """Inputs that eager does not keep are changed before a backward with cotangents that nobody expected."""
    x, bias = p.leaf("x", p.randn(3, 4, requires_grad=True)), p.leaf("bias", p.randn(4, requires_grad=True))
    unread, added = p.watch("unread", p.randn(2)), p.watch("added", p.randn(4))

    def run(x: Tensor, bias: Tensor, added: Tensor, unread: Tensor) -> Tensor:
        return x.square() + bias + added

    call = p.compile(run)
    for number, cotangent in enumerate(
        (p.randn(4, 3).t(), p.randn(1, 4).expand(3, 4), p.randn(3, 8)[:, ::2])
    ):
        out = call(x, bias, added, unread)
        with torch.no_grad():
            for changed in (bias, added, unread):
                changed.mul_(2)
        with p.backward():
            out.backward(cotangent, create_graph=number == 1)
        p.value(f"gradients {number}", (x.grad, bias.grad))


#: functions whose backward reads results only, or copies that they have made.
WITHOUT_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda x: x.tanh(),
    "exp_and_scaled": lambda x: x.exp() * 3,
    "sine_of_a_product": lambda x: (x * 2).sin(),
    "reciprocal_transposed": lambda x: x.reciprocal().t(),
}

#: cotangents whose elements are not what is in memory, or lie there in another order.
LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda g: torch.complex(g, g.detach()).conj().imag,
    "negated_twice": lambda g: torch._neg_view(torch._neg_view(g)),
    "negated_and_expanded": lambda g: torch._neg_view(g[:1]).expand_as(g),
    "conjugated": lambda g: torch.complex(g, g.detach() * 2).conj(),
    "conjugated_and_negated": lambda g: torch._neg_view(torch.complex(g, g.detach() * 2).conj()),
}


def _register_lazy(function: str, lazy: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(3, 3, requires_grad=True))
        cotangents = [LAZY[lazy](p.randn(3, 3)) for _ in range(2)]
        call = p.compile(WITHOUT_INPUTS[function])
        for changes in (False, True, True):
            given = (x * 2).to(cotangents[0].dtype)
            out = call(given)
            if changes:
                with torch.no_grad():
                    given.add_(1)
            with p.backward():
                out.backward(cotangents[0], retain_graph=True)
                p.value(f"grad {changes}", torch.autograd.grad(out, given, cotangents[1]))

    body.__name__ = f"aot_{lazy}_cotangent_of_{function}_after_its_input_changed"
    text = (
        f"A {lazy} cotangent of a {function} comes when its input has changed, which its backward needs not."
    )
    body.__doc__ = text.replace("_", " ")
    scenario(tags=(*TAGS, "in-place"))(body)


for _function in WITHOUT_INPUTS:
    for _lazy in LAZY:
        _register_lazy(_function, _lazy)


@scenario(tags=(*TAGS, "in-place"))
def aot_negated_cotangent_of_a_function_that_changes_its_input(p: Probe) -> None:
    """A lazily negated cotangent comes to a function that has changed its input in place itself."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        return a.mul_(2).tanh() + 1

    call = p.compile(run)
    for _ in range(2):
        out = call(x * 1)
        with p.backward():
            out.backward(torch._neg_view(p.randn(3, 3)))


@scenario(tags=(*TAGS, "in-place", "errors"))
def aot_negated_cotangent_after_a_saved_input_changed(p: Probe) -> None:
    """A lazily negated cotangent comes when an input has changed that was saved: an error."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))
    given = x * 2
    out = p.compile(lambda a: a.sin())(given)
    given.add_(1)
    with p.backward():
        out.backward(torch._neg_view(p.randn(3, 3)))


@scenario(tags=TAGS)
def aot_negated_cotangent_that_is_differentiated(p: Probe) -> None:
    """A lazily negated cotangent with a history of its own, under create_graph."""
    x, g = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in "xg")
    out = p.compile(lambda a: a.tanh())(x)
    with p.backward():
        (first,) = torch.autograd.grad(out, x, torch._neg_view(g), create_graph=True)
        p.value("first", first)
        first.square().sum().backward()
