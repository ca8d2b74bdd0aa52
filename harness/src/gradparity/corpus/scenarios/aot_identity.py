"""Outputs that are views of what the caller has, with a history of their own; backwards with effects.

In: a probe, whose `compile` is the identity for eager. Out: gradients, what hooks see, and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "function", "views")


class Reversed(torch.autograd.Function):
    """Returns its input; gradients change their sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -2 * grad


class ReversedView(Reversed):
    """The same with a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


class ReversedTranspose(torch.autograd.Function):
    """The same with a transposed view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.t() * -3


#: what a function returns of its argument.
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "input_through_a_function": lambda x: Reversed.apply(x),
    "view_through_a_function": lambda x: ReversedView.apply(x),
    "transposed_through_a_function": lambda x: ReversedTranspose.apply(x),
    "view_of_what_a_function_gives": lambda x: Reversed.apply(x).t(),
    "function_of_a_view": lambda x: ReversedView.apply(x[1:]),
    "value_and_function_of_it": lambda x: (lambda h: (h, Reversed.apply(h)))(x * 2),
    "function_twice": lambda x: Reversed.apply(ReversedView.apply(x)),
    "two_functions_of_one_value": lambda x: _two_of(x.sin()),
    "input_and_its_view": lambda x: (x, x.t()),
    "detached_beside_a_view": lambda x: (lambda h: (h.detach(), h[0], h))(x.exp()),
    "view_made_without_grad": lambda x: x * _no_grad_view(x),
}  # fmt: skip


def _two_of(h: Tensor) -> tuple[Tensor, Tensor]:
    return Reversed.apply(h), ReversedTranspose.apply(h)


def _no_grad_view(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.view_as(x)


def _register(form: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(4, 4, requires_grad=True))
        call = p.compile(FORMS[form])
        for step in range(2):
            h = x * 1
            made = call(h)
            outs = made if isinstance(made, tuple) else (made,)
            for i, out in enumerate(outs):
                storages = {t.untyped_storage().data_ptr() for t in (out, h)}
                p.event(f"{step}: {i} shares memory", len(storages) == 1)
                if out.requires_grad:
                    out.register_hook(p.hook(f"{step}: hook {i}"))
            roots = [out.sin().sum() for out in outs if out.requires_grad]
            with p.backward():
                p.value(f"grad{step}", torch.autograd.grad(sum(roots[1:], roots[0]), x, retain_graph=True))
                roots[-1].backward()

    body.__name__ = f"aot_identity_of_{form}"
    body.__doc__ = f"A function returns {form.replace('_', ' ')}: memory is shared, and no history is lost."
    scenario(tags=TAGS)(body)


for _form in FORMS:
    _register(_form)


class Counting(torch.autograd.Function):
    """Its backward changes a tensor from outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
        ctx.counter, ctx.change = counter, change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            ctx.change(ctx.counter)
        return grad * 2, None, None


#: what a backward does to a tensor that its function was given.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "adds": lambda t: t.add_(1),
    "writes_into_a_view": lambda t: t[0].fill_(7),
    "transposes": lambda t: t.t_(),
    "squeezes": lambda t: t.unsqueeze_(0),
    "draws": lambda t: t.uniform_(),
}


def _register_change(name: str) -> None:
    def body(p: Probe) -> None:
        x, counter = p.leaf("x", p.randn(3, 2, requires_grad=True)), torch.zeros(3, 2, device=p.device)
        call = p.compile(lambda a, c: Counting.apply(a.sin(), c, CHANGES[name]) * a)
        for step in range(2):
            out = call(x, counter)
            p.value(f"before{step}", counter.clone())
            with p.backward():
                out.sum().backward()
            p.value(f"after{step}", counter.clone())

    body.__name__ = f"aot_backward_that_{name}"
    body.__doc__ = (
        f"A backward {name.replace('_', ' ')} a tensor that the caller has, each time that it runs."
    )
    scenario(tags=(*TAGS, "in-place"), fp64=name != "draws")(body)


for _change in CHANGES:
    _register_change(_change)


@scenario(tags=TAGS)
def aot_view_made_to_require_grad(p: Probe) -> None:
    """A view of an input that needs no gradient is made to require one: it is a leaf of the caller's."""
    call = p.compile(lambda a: a.view(-1).requires_grad_())
    for step in range(2):
        x = p.randn(3, 2)
        leaf = call(x)
        p.event(f"leaf{step}", leaf.requires_grad, leaf.is_leaf, leaf.data_ptr() == x.data_ptr())
        with p.backward():
            leaf.sin().sum().backward()
        p.value(f"grad{step}", leaf.grad)


@scenario(tags=(*TAGS, "modules"))
def aot_second_derivative_through_running_statistics(p: Probe) -> None:
    """A function that changes buffers is differentiated twice; the buffers change once for each call."""
    norm = p.module(torch.nn.BatchNorm1d(3))
    call, x = p.compile(norm), p.leaf("x", p.randn(4, 3, requires_grad=True))
    for step in range(2):
        out = call(x).sin().sum()
        with p.backward():
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            p.value(f"grad{step}", grad.detach())
            p.value(f"second{step}", torch.autograd.grad(grad.square().sum(), x))
        p.value(f"mean{step}", norm.running_mean.clone())
        p.value(f"count{step}", norm.num_batches_tracked.clone())
