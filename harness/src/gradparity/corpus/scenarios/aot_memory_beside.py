"""Functions compiled ahead that write through views of more or less memory than it seems, or reshape views.

In: a probe, whose `compile` is the identity for eager. Out: what the views show, what the memory of inputs
holds, also beside them, and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import layout
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "in-place", "views")
Change = Callable[[Tensor], Any]
#: where an input begins and ends in its memory of eight elements.
WINDOWS = ((0, 4), (3, 6), (4, 8), (8, 8))
#: what eager does to tensors of which several elements are one.
WRITES: dict[str, Change] = {
    "filled": lambda t: t.fill_(3.0),
    "zeroed": lambda t: t.zero_(),
    "a row assigned": lambda t: t.__setitem__(0, 2.0),
    "a row multiplied": lambda t: t[0].mul_(3.0),
    "a part filled": lambda t: t[:1].fill_(2.0),
    "a column multiplied": lambda t: t.t()[1:2, 0].mul_(3.0),
}
EXPANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda t: t.expand(2, 3),
    "expand_as": lambda t: t.expand_as(t.new_empty(2, 3)),
    "broadcast_to": lambda t: torch.broadcast_to(t, (2, 3)),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, t.new_empty(2, 3))[0],
    "as_strided": lambda t: t.as_strided((2, 3), (0, 1)),
    "to the same size": lambda t: t.expand(1, 3),
}


@scenario(tags=TAGS)
def aot_write_beside_the_input(p: Probe) -> None:
    """Through `as_strided` a function writes before, behind, across the border of, and inside its input."""
    for begin, end in WINDOWS:
        for place in (0, 2, 3, 5):

            def run(x: Tensor, place: int = place) -> tuple[Tensor, Tensor]:
                window = torch.as_strided(x, (2,), (2,), place)
                window.mul_(3.0)
                return window, x.sum() + window.sum()

            whole = p.watch(f"{begin}-{end} {place}", p.randn(8))
            p.value(f"{begin}-{end} {place}", p.compile(run)(whole[begin:end]))


@scenario(tags=TAGS)
def aot_strided_reads_of_an_input_that_is_changed(p: Probe) -> None:
    """A function changes its input, and reads by `as_strided` what lies in it, and beside it, in memory."""
    for begin, end in WINDOWS:
        for place in (None, 0, 3, 5):
            for is_before in (False, True):

                def run(x: Tensor, place: int | None = place, early: bool = is_before) -> Tensor:
                    window = torch.as_strided(x, (2,), (1,), place) if early else x
                    x.mul_(3.0)
                    return (window if early else torch.as_strided(x, (2,), (1,), place)) * 2

                name = f"{begin}-{end} {place} {is_before}"
                if begin < 7 or place is not None:  # behind the end there is nothing
                    p.value(name, p.compile(run)(p.watch(name, p.randn(9))[begin:end]))


@scenario(tags=TAGS)
def aot_strided_copies_of_an_input_that_is_changed(p: Probe) -> None:
    """`as_strided_scatter` and `as_strided_copy` count from the beginning of the memory, as `as_strided`."""
    for begin, end in ((0, 4), (3, 7)):
        for place in (0, 3):

            def run(x: Tensor, place: int = place) -> tuple[Tensor, Tensor]:
                x.mul_(3.0)
                scattered = torch.as_strided_scatter(x, x[:2] + 1, (2,), (1,), place)
                return scattered, torch.as_strided_copy(x, (2,), (1,), place)

            whole = p.watch(f"{begin}-{end} {place}", p.randn(8))
            p.value(f"{begin}-{end} {place}", p.compile(run)(whole[begin:end]))


@scenario(tags=TAGS)
def aot_write_through_an_expanded_view(p: Probe) -> None:
    """A function writes to an expanded view of its input, or of a value, or to a part of the view."""
    for kind, expand in EXPANDS.items():
        for change, write in WRITES.items():

            def run(x: Tensor, expand: Change = expand, write: Change = write) -> tuple[Tensor, Tensor]:
                value = x * 2
                for base in (x, value):
                    write(expand(base))
                return value, x + value

            x = p.watch(f"{kind} {change}", p.randn(1, 3))
            p.value(f"{kind} {change}", p.compile(run)(x))


@scenario(tags=TAGS)
def aot_changed_and_turned_in_place(p: Probe) -> None:
    """A function changes its input, and turns it around in place: sizes stay, strides do not."""
    turns: dict[str, Change] = {
        "transpose_": lambda t: t.transpose_(0, 1),
        "t_": lambda t: t.t_(),
        "swapaxes_": lambda t: t.swapaxes_(0, 1),
    }
    for kind, turn in turns.items():
        for order in (1, -1):

            def run(x: Tensor, steps: tuple[Change, ...] = (lambda t: t.add_(1), turn)[::order]) -> None:
                for step in steps:
                    step(x)

            x = p.watch(f"{kind} {order}", p.randn(2, 2))
            p.compile(run)(x)
            p.event(f"{kind} {order}", *layout(x))


@scenario(tags=TAGS)
def aot_write_through_an_unfolded_view(p: Probe) -> None:
    """A function writes to windows of its input; what is computed of the input then lies as in eager."""
    windows: dict[str, Callable[[Tensor], Tensor]] = {
        "apart": lambda t: t.unfold(0, 1, 1),
        "gaps": lambda t: t.unfold(1, 1, 2),
        "pairs": lambda t: t.unfold(0, 2, 2),
        "one of them": lambda t: t.unfold(1, 2, 1)[:, :1],
        "a column of them": lambda t: t.unfold(0, 2, 1)[..., 0],
    }
    for kind, window in windows.items():
        for order in ((0, 1), (1, 0)):

            def run(x: Tensor, window: Callable[[Tensor], Tensor] = window) -> Tensor:
                window(x).mul_(3.0)
                return x * 2

            x = p.watch(f"{kind} {order}", p.randn(4, 4).permute(order))
            out = p.compile(run)(x)
            p.value(f"{kind} {order}", out)
            p.event(f"{kind} {order}", *layout(out), *layout(x))


@scenario(tags=(*TAGS, "versions"))
def aot_shape_of_a_view_of_an_input(p: Probe) -> None:
    """A view whose shape is changed in place counts as a change of what it shows, elements or not."""
    ways: dict[str, Callable[[Tensor], object]] = {
        "unsqueeze": lambda a: a.view(a.shape).unsqueeze_(0).sum(),
        "transpose twice": lambda a: a[1:].t_().t_().sum(),
        "nothing is returned": lambda a: (a.view(-1).unsqueeze_(0), None)[1],
        "elements too": lambda a: a.view(-1).unsqueeze_(0).mul_(2).sum(),
    }
    for name, way in ways.items():
        a = p.randn(3, 2)
        for _ in range(2):
            p.value(name, p.compile(way)(a))
            p.event(name, a._version, *a.shape)
        p.value(f"{name}: a", a)


@scenario(tags=(*TAGS, "versions"))
def aot_shape_of_a_view_without_gradients(p: Probe) -> None:
    """So does that of a view of an input that requires grad, where no gradients are taken."""
    reshapes: dict[str, Callable[[Tensor], Tensor]] = {
        "unsqueeze": lambda v: v.unsqueeze_(0),
        "transpose": lambda v: v.transpose_(0, 1),
        "as_strided": lambda v: v.as_strided_((2,), (1,)),
    }
    for name, reshape in reshapes.items():

        def inside(a: Tensor, reshape: Callable[[Tensor], Tensor] = reshape) -> Tensor:
            with torch.no_grad():
                reshape(a[::1])
            return a * 2

        x = p.leaf(name, p.randn(2, 3, requires_grad=True))
        for a in (x, x * 1):
            with torch.no_grad():
                p.compile(lambda t, reshape=reshape: (reshape(t[::1]), None)[1])(a)
            p.event(f"{name} around", a._version)
            out = p.compile(inside)(a)
            p.event(f"{name} inside", a._version, *a.shape)
            with p.backward():
                out.sum().backward()
