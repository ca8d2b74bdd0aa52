"""Inputs of functions compiled ahead that share memory: one tensor twice, views of one another, overlaps.

In: a probe, whose `compile` is the identity for eager. Out: what all the aliases hold, and one gradient each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history, share
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "aliasing")


@scenario(tags=TAGS)
def aot_one_tensor_twice(p: Probe) -> None:
    """The same leaf as both arguments gets the sum of two gradients; then two leaves get one each."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))
    run = p.compile(lambda a, b: a.sin() * b)
    for step, (one, other) in enumerate(((x, x), (x, y), (y, y), (y, x))):
        with p.backward():
            run(one, other).sum().backward()
        p.value(f"grads{step}", (x.grad, y.grad))


@scenario(tags=(*TAGS, "in-place"))
def aot_one_tensor_twice_and_changed(p: Probe) -> None:
    """One tensor under two names is changed under the first: the second sees it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b.exp()

    h = x * 2
    out = p.compile(run)(h, h)
    p.value("h", h.detach())
    with p.backward():
        (out + h).sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_two_overlapping_views(p: Probe) -> None:
    """Two overlapping views of a plain buffer are both changed: each change is seen through the other."""
    base, w = p.randn(5), p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        return a[1:] @ w[:2] + b.sum() * w[2]

    out = p.compile(run)(base[:3], base[2:], w)
    p.value("base", base)
    with p.backward():
        out.backward()


@scenario(tags=(*TAGS, "in-place", "views"))
def aot_view_with_history_is_changed(p: Probe) -> None:
    """A view of an intermediate is changed inside: the whole base and its gradient follow."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a.mul_(3)
        return a.sin()

    base = x * 1
    part = base[1:3]
    out = p.compile(run)(part)
    p.value("base", base.detach())
    p.event("is a view of base", part._base is base, *history(part))
    with p.backward():
        (base.square().sum() + out.sum()).backward()


@scenario(tags=(*TAGS, "in-place", "views"))
def aot_base_and_its_view(p: Probe) -> None:
    """Base and view come in; the base is changed, the view is read, and both are used by the caller."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(whole: Tensor, turned: Tensor) -> Tensor:
        whole.exp_()
        return turned.sum(0)

    base = x * 1
    turned = base.t()
    out = p.compile(run)(base, turned)
    p.value("turned", turned.detach())
    with p.backward():
        (out.square().sum() + turned[0].sum() + base.sum()).backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_views_that_do_not_overlap(p: Probe) -> None:
    """The halves of one buffer, the first changed: the second stays, and differentiates as it is."""
    base, w = p.randn(6), p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.zero_()
        return (a + b) * w

    first, second = base.chunk(2)
    out = p.compile(run)(first, second, w)
    p.value("base", base)
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_aliased_in_one_call_and_apart_in_the_next(p: Probe) -> None:
    """Two arguments share memory, then they do not, then they do: each call sees its own case."""
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.mul_(2)
        return b * w

    call = p.compile(run)
    for step in range(3):
        a = p.randn(3)
        b = p.randn(3) if step == 1 else a.view(3)
        with p.backward():
            call(a, b, w).sum().backward()
        p.value(f"step{step}", (a, b, w.grad))


@scenario(tags=TAGS)
def aot_leaf_and_its_view(p: Probe) -> None:
    """A leaf and a view of it are both arguments: gradients go to the leaf directly and through the view."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    row = x[0]
    row.register_hook(p.hook("row"))
    out = p.compile(lambda a, b: a.sin() * b)(x, row)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_leaf_and_its_detached_alias(p: Probe) -> None:
    """A leaf and its detached alias are both arguments: only the leaf gets a gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a, b: a * b.exp())(x, x.detach())
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "in-place"))
def aot_buffer_and_its_detached_alias_changed(p: Probe) -> None:
    """A parameter's detached alias is changed inside: the parameter, read afterwards, is the changed one."""
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def run(alias: Tensor, w: Tensor) -> Tensor:
        alias.mul_(0.5)
        return w.square()

    out = p.compile(run)(w.detach(), w)
    p.value("w", w.detach())
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_expanded_input(p: Probe) -> None:
    """An input whose rows are one and the same memory."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: (a * a.sum(0)).cos())(x.expand(4, 3))
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_parameter_as_argument_and_in_the_module(p: Probe) -> None:
    """A module gets its own weight as an argument too: one gradient, of both uses."""

    class Twice(nn.Module):
        """Uses its weight and the one that it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor, again: Tensor) -> Tensor:
            return (x * self.weight).sin() * again

    layer = p.module(Twice())
    with p.backward():
        p.compile(layer)(p.randn(3), layer.weight).sum().backward()


@scenario(tags=TAGS)
def aot_flat_buffer_behind_the_parameters(p: Probe) -> None:
    """Parameters that are views of one flat buffer get gradients of their own."""
    flat = p.randn(9)
    weight = p.leaf("weight", flat[:6].view(2, 3).detach().requires_grad_())
    bias = p.leaf("bias", flat[6:8].detach().requires_grad_())
    run = p.compile(lambda x, w, b: torch.nn.functional.linear(x, w, b).tanh())
    for _ in range(2):
        with p.backward():
            run(p.randn(4, 3), weight, bias).sum().backward()
        with torch.no_grad():
            flat[8].add_(1)
            weight.sub_(0.1 * weight.grad)
    p.value("flat", flat)
    p.event("shared", share(weight, flat), share(bias, flat))


def _sharing(base: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Two tensors that share memory otherwise in each step."""
    places = ((0, 4), (0, 2), (2, 0), (0, 4), (1, 2))
    first, second = places[step]
    return base[first : first + 4], base[second : second + 4]


def _change_the_first(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    a.mul_(2)
    return (b * w).sum() + a.sum()


@scenario(tags=TAGS)
def aot_inputs_that_overlap_at_changing_offsets(p: Probe) -> None:
    """A changed input overlaps another one, further on in each call."""
    w, base = p.leaf("w", p.randn(4, requires_grad=True)), p.watch("base", p.randn(12))
    call = p.compile(_change_the_first)
    for step in range(5):
        with p.backward():
            call(*_sharing(base, step), w).backward()


@scenario(tags=TAGS)
def aot_inputs_that_numpy_made_overlap(p: Probe) -> None:
    """Two tensors show the same memory of NumPy's, each by a storage of its own; one of them is changed."""
    memory = p.randn(12).numpy()
    w = p.leaf("w", p.randn(4, requires_grad=True))
    call = p.compile(_change_the_first)
    for step in range(5):
        a, b = _sharing(torch.from_numpy(memory[::1]), step)
        with p.backward():
            call(torch.from_numpy(a.numpy()), torch.from_numpy(b.numpy()), w).backward()
    p.value("memory", torch.from_numpy(memory.copy()))


@scenario(tags=TAGS)
def aot_input_and_its_alias_by_numpy(p: Probe) -> None:
    """A tensor of torch's and what NumPy gives back of it have two storages, and one memory."""
    base, w = p.randn(8), p.leaf("w", p.randn(4, requires_grad=True))
    alias = torch.from_numpy(base.numpy())

    def run(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.add_(1)
        return (b * w).sum()

    call = p.compile(run)
    for a, b in (
        (base[:4], p.randn(4)),
        (base[:4], alias[:4]),
        (alias[2:6], base[:4]),
        (base[:4], alias[4:]),
    ):
        with p.backward():
            call(a, b, w).backward()


#: ways to have some memory a second time. Those made by autograd count changes together with the first.
SECOND = {
    "part": lambda x: x[1:],
    "detached": Tensor.detach,
    "part detached": lambda x: x[1:].detach(),
    "detached part": lambda x: x.detach()[1:],
    "data": lambda x: x.data,
    "part of data": lambda x: x.data[1:],
    "set": lambda x: x.new_empty(0).set_(x),
}
#: which of the two is changed in place.
CHANGES = {
    "the second": lambda x, again: again.add_(1),
    "the first": lambda x, again: x.mul_(2),
    "both": lambda x, again: (again.add_(1), x.mul_(2), x.add_(1)),
    "a part of the second": lambda x, again: again[0].add_(1),
}


@scenario(tags=(*TAGS, "in-place"))
def aot_who_counts_a_change_of_shared_memory(p: Probe) -> None:
    """What shares memory may share version counters or not: counts, and errors for what was saved, follow."""
    w = p.leaf("w", p.randn(4, requires_grad=True))
    for name, change in CHANGES.items():

        def run(x: Tensor, again: Tensor, change: Callable[..., Any] = change) -> Tensor:
            change(x, again)
            return x.sum() + again.sum()

        call = p.compile(run)
        for step, (how, make) in enumerate([*SECOND.items(), *reversed(SECOND.items())]):
            x = p.randn(4)
            again = make(x)
            outs = [x * w, again * w[: len(again)]]
            before = x._version, again._version
            p.value(f"{name}, {how} {step}", (call(x, again), x, again))
            p.event(f"{name}, {how} {step}", x._version - before[0], again._version - before[1])
            for number, out in enumerate(outs):
                try:
                    with p.backward():
                        out.sum().backward()
                except RuntimeError as error:
                    p.event(f"error {number}", "modified by an inplace operation" in str(error))


@scenario(tags=(*TAGS, "in-place"))
def aot_leaf_that_is_a_view_beside_its_view(p: Probe) -> None:
    """A leaf that is a view of what needs no gradient, and a view of the leaf; one of them is changed."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda t: t,
        "transposed": lambda t: t.t(),
        "a part": lambda t: t[1:],
        "columns": lambda t: t[:, ::2],
    }
    for kind, make in kinds.items():
        for changed in (0, 1, None):
            for order in (1, -1):

                def run(x: Tensor, seen: Tensor, changed: int | None = changed) -> Tensor:
                    if changed is not None:
                        with torch.no_grad():
                            (x, seen)[changed].add_(2.0)
                    return x * 3 + seen.sum()

                name = f"{kind} {changed} {order}"
                leaf = p.leaf(name, make(p.randn(3, 4)).requires_grad_())
                seen = leaf[::1] if changed else leaf.detach()[::1]
                out = p.compile(run)(*(leaf, seen)[::order])
                p.event(name, out.requires_grad, *history(leaf), *history(seen))
                p.value(name, (out, leaf.detach(), seen.detach()))
                if out.requires_grad:
                    with p.backward():
                        out.sum().backward()
