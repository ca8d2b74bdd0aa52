"""Outputs of functions compiled ahead that are views: of inputs, of one another, of what stays inside.

In: a probe, whose `compile` is the identity for eager. Out: whose memory the outputs have, whose views they
are, and gradients after the caller has changed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history, layout, share
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "aliasing", "views")


@scenario(tags=TAGS)
def aot_output_is_the_input(p: Probe) -> None:
    """A function that returns its argument returns the same object, a leaf if it was one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    same, other = p.compile(lambda a: (a, a.sin()))(x)
    p.event("same object", same is x, *history(same))
    with p.backward():
        (same * other).sum().backward()


@scenario(tags=TAGS)
def aot_output_is_a_view_of_an_input(p: Probe) -> None:
    """A view of an intermediate: its memory is the caller's, and its base is the caller's tensor."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    h = x * 2
    row = p.compile(lambda a: a[1])(h)
    p.event("view", share(row, h), row._base is h, *layout(row), *history(row))
    with p.backward():
        (row * h).sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_view_output_changed_by_the_caller(p: Probe) -> None:
    """The caller writes into a returned view of its own tensor, and so changes that tensor too."""
    x, y = p.leaf("x", p.randn(2, 3, requires_grad=True)), p.leaf("y", p.randn(3, requires_grad=True))
    h = x * 2
    row = p.compile(lambda a: a[0])(h)
    row.mul_(y)
    p.value("h", h.detach())
    with p.backward():
        h.square().sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_view_of_a_plain_buffer_changed_by_the_caller(p: Probe) -> None:
    """A returned view of a buffer without history is a window on the buffer."""
    buffer, w = p.randn(4), p.leaf("w", p.randn(2, requires_grad=True))
    window, out = p.compile(lambda b, w: (b[1:3], b.sum() * w))(buffer, w)
    window.fill_(7)
    p.value("buffer", buffer)
    p.event("view", share(window, buffer), *layout(window), *history(window))
    with p.backward():
        (out * window).sum().backward()


@scenario(tags=TAGS)
def aot_outputs_are_views_of_one_intermediate(p: Probe) -> None:
    """Two outputs share the memory of a result that is not returned itself."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        result = a.sin()
        return result[0], result.t()

    row, turned = p.compile(run)(x)
    p.event("views", share(row, turned), *layout(row), *layout(turned))
    with p.backward():
        (row.sum() + turned.square().sum()).backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_one_of_two_views_changed_by_the_caller(p: Probe) -> None:
    """Writing into one returned view is seen through the other, and its gradient is that of the new value."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        result = a + 1
        return result[0], result.view(-1)

    row, flat = p.compile(run)(x)
    row.mul_(5)
    p.value("flat", flat.detach())
    with p.backward():
        flat.square().sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_result_and_its_view_changed_by_the_caller(p: Probe) -> None:
    """The result and a view of it come out; the caller changes the result, and differentiates the view."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        result = a * 3
        return result, result[:, 1]

    result, column = p.compile(run)(x)
    p.event("view", column._base is result, share(result, column))
    result.add_(1)
    p.value("column", column.detach())
    with p.backward():
        column.exp().sum().backward()


@scenario(tags=TAGS)
def aot_one_result_returned_twice(p: Probe) -> None:
    """A result in two places of the output is one object there."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = a.exp()
        return result, a * 2, result

    first, middle, last = p.compile(run)(x)
    p.event("same object", first is last)
    last.register_hook(p.hook("result"))
    with p.backward():
        (first * middle + last).sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_chain_of_views(p: Probe) -> None:
    """A view of a view of a view of the input, changed by the caller."""
    x = p.leaf("x", p.randn(2, 3, 4, requires_grad=True))
    h = x.clone()
    out = p.compile(lambda a: a.transpose(0, 2)[1:3].reshape(2, -1).narrow(0, 0, 1).squeeze(0))(h)
    p.event("layout", *layout(out), share(out, h))
    out.mul_(2)
    with p.backward():
        (h.sum() + out.square().sum()).backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_changed_input_and_a_view_of_it(p: Probe) -> None:
    """An input is changed inside and a view of it returned: the view belongs to the changed input."""
    x = p.leaf("x", p.randn(2, 2, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a.mul_(2)
        return a.diagonal()

    h = x + 0
    diagonal = p.compile(run)(h)
    p.event("view", share(diagonal, h), diagonal._base is h)
    diagonal.add_(1)
    p.value("h", h.detach())
    with p.backward():
        (h * p.randn(2, 2)).sum().backward()


@scenario(tags=TAGS)
def aot_detached_input_as_output(p: Probe) -> None:
    """The detached input shares its memory, requires no grad, and its use adds nothing to the gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    constant, out = p.compile(lambda a: (a.detach(), a.sin()))(x)
    p.event("constant", share(constant, x), *history(constant))
    with p.backward():
        (out * constant).sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_detached_result_changed_by_the_caller(p: Probe) -> None:
    """A result and its detached alias: the caller scales the alias in place, the result shows it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        result = a * 2
        return result, result.detach()

    result, alias = p.compile(run)(x)
    alias.mul_(10)
    p.value("result", result.detach())
    with p.backward():
        result.square().sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_view_of_several_outputs_changed(p: Probe) -> None:
    """One of several views that `unbind` returned at once must not be changed in place: a RuntimeError."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    first, _ = p.compile(lambda a: (a * 2).unbind(0))(x)
    first.mul_(3)


@scenario(tags=(*TAGS, "errors"))
def aot_view_made_under_no_grad_changed(p: Probe) -> None:
    """A view that was made under no_grad must not be changed in place where grad is on: a RuntimeError."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        with torch.no_grad():
            return a[0]

    h = x * 2
    row = p.compile(run)(h)
    p.event("row", share(row, h), *history(row))
    row.mul_(h[1])


@scenario(tags=TAGS)
def aot_output_expanded_and_strided(p: Probe) -> None:
    """Outputs keep the strides that eager gives them: expanded, transposed, stepped, with an offset."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, ...]:
        s = a.sin()
        return s.sum(0).expand(2, 4), s.t(), s[1:, ::2], s.permute(1, 0).contiguous()

    outs = p.compile(run)(x)
    for place, out in enumerate(outs):
        p.event(f"layout{place}", *layout(out))
    with p.backward():
        torch.stack([out.square().sum() for out in outs]).sum().backward()


@scenario(tags=TAGS)
def aot_constant_of_the_function_as_output(p: Probe) -> None:
    """A returned tensor of the surroundings is that tensor; one that is made inside is new each call."""
    x, constant = p.leaf("x", p.randn(3, requires_grad=True)), p.randn(3)
    call = p.compile(lambda a: (a * constant, constant, torch.zeros_like(a) + 1))
    (one, same, made), (other, _, again) = call(x), call(x)
    p.event("constant", same is constant, share(made, again))
    with p.backward():
        (one + other * made).sum().backward()


#: operators whose results may lie otherwise in memory than torch's fake tensors say; of some they do.
LAID_OUT = {
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "hardtanh": functional.hardtanh,
    "logit": lambda a: a.sigmoid().logit(),
    "renorm": lambda a: a.renorm(2, 0, 1.0),
    "log_softmax": lambda a: a.log_softmax(1),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 0),
    "glu": lambda a: functional.glu(a, 0),
}


@scenario(tags=(*TAGS, "layout"))
def aot_views_of_results_of_every_layout(p: Probe) -> None:
    """A result of a permuted input is returned with views of it, which show its elements in their order."""
    for name, operator in LAID_OUT.items():
        for order in ((3, 1, 0, 2), (1, 0, 2, 3), (2, 3, 1, 0)):
            x = p.leaf(f"{name} {order}", p.randn(2, 4, 2, 6).permute(order).requires_grad_())

            def run(a: Tensor, operator: Callable[[Tensor], Tensor] = operator) -> tuple[Tensor, ...]:
                whole = operator(a)
                return whole, whole.detach(), whole.transpose(0, 1), whole[1:], whole.detach().mT

            outputs = p.compile(run)(x)
            with p.backward():
                (outputs[0].sum() + outputs[2].square().sum() + outputs[3].exp().sum()).backward()
            p.value(f"{name} {order}", outputs)


@scenario(tags=(*TAGS, "modes", "in-place"))
def aot_views_of_what_has_no_elements(p: Probe) -> None:
    """A view without elements is a view: under `no_grad` it gets no history; one of a leaf is not written."""
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "a row": lambda t: t[0],
        "nothing of it": lambda t: t[:, :0],
        "flat": lambda t: t.reshape(-1)[:0],
        "transposed": lambda t: t.t(),
        "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    }
    bases = {
        "leaf": lambda t: t.requires_grad_(),
        "inner": lambda t: t.requires_grad_() * 1,
        "plain": lambda t: t,
    }
    for (base, made), (name, view), width in itertools.product(bases.items(), views.items(), (0, 2)):
        for mode in (torch.enable_grad, torch.no_grad):
            given = made(p.randn(2, width))
            with mode():
                shown = p.compile(view)(given)
            p.event(f"{name} of {base}", shown._is_view(), *history(shown), *layout(shown))
            try:
                shown.mul_(2)
            except RuntimeError as error:
                p.event("refused", str(error)[:40])
            p.event("versions", given._version, shown._version)


@scenario(tags=(*TAGS, "modes"))
def aot_views_of_intermediates_without_history(p: Probe) -> None:
    """A view made under `no_grad` of an intermediate says that it requires grad, and has no history."""
    w = p.leaf("w", p.randn(2, 3, requires_grad=True))

    def shown(make: Callable[[Tensor], Tensor], is_leaf: bool, with_base: bool) -> Callable[[Tensor], Any]:
        def run(a: Tensor) -> Any:
            inner = make(a)
            with torch.no_grad():
                view = inner.t()
            if is_leaf:
                view.requires_grad_()
            return (view, inner.sum()) if not with_base else (view, inner)

        return run

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "product": lambda a: a * 2,
        "joined": lambda a: torch.cat([a, a]),
        "detached": lambda a: (a * 2).detach(),
    }
    for (kind, make), is_leaf, with_base in itertools.product(kinds.items(), (False, True), (False, True)):
        view, other = p.compile(shown(make, is_leaf, with_base))(w)
        p.event(f"{kind} {is_leaf} {with_base}", view._is_view(), *history(view), *layout(view))
        try:
            torch.autograd.backward([view], [torch.ones_like(view)], inputs=[w])
        except RuntimeError as error:
            p.event("refused", str(error)[:60])
        if other.requires_grad:
            with p.backward():
                other.sum().backward()
