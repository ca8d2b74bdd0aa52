"""Views among the outputs of a function compiled ahead, by way of which others are reached.

In: a probe, whose `compile` is the identity for eager. Out: gradients of the views themselves, what hooks on
them see, and sums whose last bits say by which way gradients came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history, layout
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "aliasing", "views")
Map = Callable[[Tensor], Tensor]
VIEWS: dict[str, Map] = {
    "view": lambda t: t.view(-1),
    "transposed": lambda t: t.transpose(0, 1),
    "a part": lambda t: t[1:],
    "gaps": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(3, 4),
    "diagonal": lambda t: t.diagonal(),
    "strided": lambda t: t.as_strided((2, 3), (1, 2), 1),
    "a piece": lambda t: t.split(2, 1)[1],
    "a row": lambda t: t.unbind()[1],
    "twice": lambda t: t.t().unsqueeze(0),
}
BASES: dict[str, Map] = {
    "the input": lambda t: t,
    "a hidden value": lambda t: t.sin() * 2,
}


def _show(p: Probe, name: str, output: Tensor) -> None:
    p.event(name, *layout(output), *history(output))


@scenario(tags=TAGS)
def aot_gradient_of_a_view_that_is_used(p: Probe) -> None:
    """A gradient with respect to a returned view is that of everything that was computed from the view."""
    leaf = p.leaf("x", p.randn(3, 4, requires_grad=True))
    for of, base in BASES.items():

        def run(x: Tensor, base: Map = base) -> tuple[list[Tensor], list[Tensor]]:
            seen = [view(base(x)) for view in VIEWS.values()]
            return seen, [each.cos() * 3 for each in seen]

        for x in (leaf, leaf.exp()):
            views, results = p.compile(run)(x)
            for kind, seen, made in zip(VIEWS, views, results, strict=True):
                _show(p, f"{kind} of {of}", seen)
                with p.backward():
                    loss = (made * p.rand(*made.shape)).sum()
                    grads = torch.autograd.grad(loss, (seen, x), retain_graph=True)
                p.value(f"{kind} of {of}", tuple(grad.contiguous() for grad in grads))


@scenario(tags=(*TAGS, "hooks"))
def aot_hook_on_a_view_that_is_used(p: Probe) -> None:
    """A hook on a returned view sees the sum of the caller's gradient and of what was computed inside."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        hidden = x.tanh()
        rows, columns = x.view(-1), hidden.mT
        return rows, rows.sin() * 2, columns, columns.exp(), hidden

    outputs = p.compile(run)(x)
    for number, output in enumerate(outputs):
        output.register_hook(p.hook(f"output {number}"))
    outputs[0].retain_grad()
    with p.backward():
        sum((output * output).sum() for output in outputs).backward()
    p.value("kept", outputs[0].grad)


@scenario(tags=TAGS)
def aot_view_of_a_view_output(p: Probe) -> None:
    """Of two returned views one may be made of the other: then its gradient goes there first."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        flat, hidden = x.view(-1), x.cos()
        part, turned = flat[2:], hidden.t()
        return flat, part, part[::2], hidden, turned, turned[1:]

    outputs = p.compile(run)(x)
    for number, output in enumerate(outputs):
        _show(p, f"output {number}", output)
    with p.backward():
        for base, parts in ((0, (1, 2)), (1, (2,)), (3, (4, 5)), (4, (5,))):
            loss = sum(outputs[part].square().sum() for part in parts)
            grad = torch.autograd.grad(loss, outputs[base], retain_graph=True)[0]
            p.value(f"{base}", grad.contiguous())
        sum(output.square().sum() for output in outputs).backward()


@scenario(tags=TAGS)
def aot_view_of_what_was_computed_from_a_view(p: Probe) -> None:
    """Of two returned views one may be a view of what was computed from the other: it is no part of that."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        seen = x[...]
        made = seen * 2
        one, two = made.chunk(2)
        turned = (one + 1).unsqueeze(0)
        return one, seen, made, turned, turned.exp(), two[1:]

    outputs = p.compile(run)(x)
    with p.backward():
        for number, output in enumerate(outputs):
            p.value(f"{number}", torch.autograd.grad(output.square().sum(), x, retain_graph=True)[0])


@scenario(tags=(*TAGS, "order"))
def aot_sum_at_a_view_output(p: Probe) -> None:
    """What is computed from a returned view is added there first, and then to what came by other ways."""
    x = p.leaf("x", p.rand(64, requires_grad=True))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        hidden = (x + 0.5).log()
        one, two = hidden.view(8, 8).chunk(2)
        seen = x.unsqueeze(0)
        return seen, seen.sin(), torch.addcmul(seen, x, x), one, one.half().float() * one, two[1:], two.exp()

    outputs = p.compile(run)(x)
    with p.backward():
        sum((output * p.rand(*output.shape)).sum() for output in outputs).backward()


@scenario(tags=(*TAGS, "order", "hooks"))
def aot_views_of_inputs_have_their_turn(p: Probe) -> None:
    """Where a returned view was made first, its input is complete last."""
    leaves = [p.leaf(f"leaf {i}", p.rand(4, requires_grad=True)) for i in range(3)]
    for number, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(p.hook(f"leaf {number}", kind="post_acc"))

    def run(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        first, second = a.view(2, 2), b * 2
        return second, c[1:], first

    for _ in range(2):
        outputs = p.compile(run)(*leaves)
        with p.backward():
            sum(output.sum() for output in outputs).backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_view_that_is_used_changed_by_the_caller(p: Probe) -> None:
    """The caller writes into a returned view, after something was computed from it that saved nothing."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    h = x * 2

    def run(h: Tensor) -> tuple[Tensor, Tensor]:
        seen = h.view(-1)
        return seen, seen + 1

    seen, made = p.compile(run)(h)
    seen.mul_(3)
    p.value("h", h.detach())
    with p.backward():
        (made.sum() + h.square().sum()).backward()


@scenario(tags=TAGS)
def aot_view_whose_shape_changed_in_place(p: Probe) -> None:
    """A returned view has the shape that the function gave it last."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def turned(a: Tensor) -> Tensor:
        return a.permute(1, 0).transpose_(0, 1)

    def shorter(a: Tensor) -> Tensor:
        return a[1:].squeeze_(0)

    def longer(a: Tensor) -> Tensor:
        return (a + 1).mT.unsqueeze_(0)

    for number, function in enumerate((turned, shorter, longer)):
        output = p.compile(function)(x * 2)
        _show(p, f"output {number}", output)
        with p.backward():
            (output * p.rand(*output.shape)).sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_views_without_grad_that_are_computed_with(p: Probe) -> None:
    """What is computed from a view made under no_grad requires grad, but its gradient goes nowhere."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))

    def alone(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            seen, (piece, _, _) = x.view(-1), x.detach().unbind()
        return seen * 2, piece

    def both(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            seen = x.view(-1)
        return seen * 2, seen * x.sum()

    for name, function in (("alone", alone), ("both", both)):
        outputs = p.compile(function)(x)
        for number, output in enumerate(outputs):
            _show(p, f"{name} {number}", output)
        with p.backward():
            sum(output.sum() for output in outputs if output.requires_grad).backward()


@scenario(tags=("compiled", "aot", "in-place"))
def aot_changes_by_operators_on_lists(p: Probe) -> None:
    """Operators on lists of tensors change each of them once, as its version counter says."""
    first, second, third = (p.watch(f"t{i}", p.rand(3)) for i in range(3))
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
        torch._foreach_mul_([a, h], 2)
        torch._foreach_zero_([b])
        torch._foreach_copy_([c], [a])
        return h + c

    h = p.watch("h", x * 1)
    with p.backward():
        p.compile(run)(first, second, third, h).sum().backward()


LAZY: dict[str, Map] = {
    "conjugated": lambda t: t.conj(),
    "conjugated and flat": lambda t: t.conj().reshape(-1),
    "negated": lambda t: torch._neg_view(t),
    "both": lambda t: torch._neg_view(t.conj()),
    "imaginary part of the conjugate": lambda t: t.conj().imag,
}
PIECES: dict[str, Map] = {
    "a part, conjugated": lambda t: t[1:].conj(),
    "a part of the conjugate": lambda t: t.conj()[1:],
    "conjugated twice": lambda t: t.conj()[1:].conj(),
}


def _show_lazy(p: Probe, kinds: dict[str, Map]) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        hidden = x * 2
        return tuple(view(base) for base in (x, hidden) for view in kinds.values())

    call = p.compile(run)
    for requires_grad in (False, True):
        for rows in (2, 3, 5):
            x = torch.complex(p.randn(rows, 2), p.randn(rows, 2)).requires_grad_(requires_grad)
            outputs = call(x)
            for number, output in enumerate(outputs):
                p.event(f"{number}", output.is_conj(), output.is_neg(), *layout(output))
            p.value(f"outputs of {rows} {requires_grad}", tuple(output.resolve_neg() for output in outputs))
            for number, output in enumerate(outputs if requires_grad else ()):
                with p.backward():
                    (grad,) = torch.autograd.grad(output.abs().sum(), x, retain_graph=True)
                p.value(f"gradient {number} of {rows}", grad)


@scenario(tags=(*TAGS, "complex"))
def aot_lazy_views_of_several_sizes(p: Probe) -> None:
    """Views that are conjugated or negated lazily stay so, of an input and of a hidden value."""
    _show_lazy(p, LAZY)


@scenario(tags=(*TAGS, "complex"))
def aot_lazy_pieces_of_several_sizes(p: Probe) -> None:
    """Parts of a lazily conjugated view, and conjugates of parts, begin where they begin in eager."""
    _show_lazy(p, PIECES)


SEEN: dict[str, Map] = {
    "rows": lambda t: t[1:],
    "transposed": lambda t: t.mT,
    "the same": lambda t: t.view_as(t),
    "one more dimension": lambda t: t.unsqueeze(0).transpose(0, 1),
    "diagonal": lambda t: t.diagonal(),
    "divided": lambda t: t.unflatten(-1, (1, -1)),
    "a piece": lambda t: t.split(1)[1],
}
SHARING: dict[str, Map] = {
    "the last": lambda t: t[..., :1].expand_as(t),
    "the last of a transposed one": lambda t: t[..., :1].expand_as(t).transpose(0, 1),
    "the first": lambda t: t[:1].expand_as(t),
    "all": lambda t: t[:1, :1].expand_as(t),
}


@scenario(tags=TAGS)
def aot_views_of_inputs_whose_elements_share_memory(p: Probe) -> None:
    """Each element of a view of an expanded input has a gradient of its own, as each of the input has."""
    for expanded, expand in SHARING.items():
        call = p.compile(lambda t: (t * 2, *[view(t) for view in SEEN.values()]))
        for rows, of in ((3, None), (4, 1), (5, None)):
            x = expand(p.randn(rows, 5)).requires_grad_()
            outputs = call(x if of is None else x[:, of:])
            shown = [output.reshape(-1) * torch.arange(float(output.numel())) for output in outputs]
            with p.backward():
                (grad,) = torch.autograd.grad(torch.cat(shown).sum(), x)
            p.value(f"{expanded} of {rows}", grad)


#: ways to index a matrix; where sizes are symbolic, torch makes nodes of ``:`` that it leaves out otherwise.
INDEXED = {
    "column": lambda m: m[:, 0],
    "columns": lambda m: m[:, :1],
    "rows and columns": lambda m: m[1:, :],
    "whole": lambda m: m[:],
    "whole twice": lambda m: m[:, :],
    "row of the whole": lambda m: m[:][0],
    "new dimension": lambda m: m[:, None],
    "last": lambda m: m[..., -1],
    "every second": lambda m: m[:, ::2],
    "picked": lambda m: m[:, [0, 0]],
    "masked": lambda m: m[:, torch.tensor([True, False, True], device=m.device)],
    "written": lambda m: m.clone().index_put_((torch.tensor(0, device=m.device),), m[:, 0].sum()),
}


@scenario(tags=(*TAGS, "double-backward"))
def aot_indexed_outputs_that_are_differentiated_again(p: Probe) -> None:
    """An intermediate is returned indexed in two ways; cotangents lie otherwise, and are differentiated."""
    ways = [*INDEXED.items()]
    for number, (name, way) in enumerate(ways):
        other = ways[(number + 5) % len(ways)][1]
        x, y = (p.leaf(f"{leaf} {name}", p.randn(6, 3, requires_grad=True)) for leaf in "xy")

        def run(x: Tensor, y: Tensor, way: Any = way, other: Any = other) -> tuple[Tensor, ...]:
            product = x * y
            return product, way(product), other(product.sin())

        call = p.compile(run)
        for rows in (6, 4, 5):
            outs = call(x[:rows], y[:rows])
            slopes = [p.randn(*out.shape[::-1]).permute(*reversed(range(out.dim()))) for out in outs]
            with p.backward():
                torch.autograd.backward(outs, slopes)
            outs = call(x[:rows], y[:rows])
            slopes = [slope.requires_grad_() for slope in slopes]
            grads = torch.autograd.grad(outs, (x, y), slopes, create_graph=True)
            with p.backward():
                (grads[0].square().sum() + grads[1].sin().sum()).backward()
            p.value(f"{name} {rows}", (*grads, *(slope.grad for slope in slopes)))


HIDDEN: dict[str, Map] = {
    "detached": lambda t: t.detach(),
    "detached part": lambda t: t[1:].detach(),
    "detached row": lambda t: t.detach()[0],
}
ODD: dict[str, Callable[[Probe], Tensor]] = {
    "negated": lambda p: torch.complex(p.randn(3, 4), p.randn(3, 4)).conj().imag,
    "columns": lambda p: p.randn(4, 3).t(),
    "wider": lambda p: p.randn(3, 4).double(),
}


@scenario(tags=TAGS)
def aot_views_with_and_without_a_history(p: Probe) -> None:
    """Views of one hidden value, one of them detached, beside a result, in a backward that is made anew."""
    for kind, odd in ODD.items():
        for name, hidden in HIDDEN.items():
            for place in range(3):

                def run(x: Tensor, place: int = place, hidden: Map = hidden) -> list[Tensor]:
                    value = x * 3
                    made = [value.transpose(0, 1), value - value.cos()]
                    made.insert(place, hidden(value))
                    return made

                x = p.leaf(f"{kind} {name} {place}", p.randn(3, 4, requires_grad=True))
                made = p.compile(run)(x)
                result = next(one for one in reversed(made) if one.requires_grad)
                with p.backward():
                    torch.autograd.backward([result], [odd(p).to(result.dtype)])
                p.value(f"{kind} {name} {place}", [one.detach() for one in made])
                p.event(f"{kind} {name} {place}", [one.requires_grad for one in made])


@scenario(tags=TAGS)
def aot_view_of_a_view_that_was_made_a_leaf(p: Probe) -> None:
    """A function makes a view of its input, or of a value, require grad, and returns a view of that."""
    for name, base in {"input": lambda t: t, "value": lambda t: t.exp()}.items():
        for kind, view in VIEWS.items():
            for returns_leaf in (False, True):

                def run(x: Tensor, base: Map = base, view: Map = view, both: bool = returns_leaf) -> Any:
                    leaf = base(x)[:, :]
                    leaf.requires_grad_()
                    return (view(leaf), leaf) if both else [view(leaf)]

                seen, *leaf = p.compile(run)(p.randn(3, 4))
                p.event(f"{kind} of {name} {returns_leaf}", *history(seen))
                with p.backward():
                    seen.sum().backward()
                p.value(f"{kind} of {name} {returns_leaf}", [one.grad for one in leaf])
