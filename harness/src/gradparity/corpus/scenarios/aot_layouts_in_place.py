"""Changes in place of tensors in any layout, by operations whose functional form lays its result out anew.

In: a probe, whose `compile` is the identity for eager. Out: values, strides and gradients of the tensor that
was changed, of its base, and of views that were taken before and after. One scenario for each operation and
each layout; then windows with gaps, and lists in which memory stands twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import layout
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "in-place", "layout")

#: made of a contiguous tensor of four by four.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "stepped": lambda base: base[:, ::2],
    "transposed_part": lambda base: base.t()[1:],
}

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "cumsum": lambda view: view.cumsum_(0),
    "masked_fill": lambda view: view.masked_fill_(view > 0.5, 2.0),
    "copy": lambda view: view.copy_(view.flip(0).contiguous() * 2),
    "index_fill": lambda view: view.index_fill_(0, torch.tensor([0], device=view.device), 3.0),
    "data": lambda view: view.data.cumsum_(0) if not view.requires_grad else view.cumsum_(0),
}


def _register(name: str, layout: Callable[[Tensor], Tensor], change: Callable[[Tensor], Any]) -> None:
    def body(p: Probe) -> None:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            base = x * 1
            view = layout(base)
            before = view[:1]
            change(view)
            return base, view, before, view[1:], base[1:]

        for x in (p.leaf("x", p.randn(4, 4, requires_grad=True)), p.randn(4, 4)):
            outputs = p.compile(run)(x)
            for number, output in enumerate(outputs):
                p.value(f"{number} {x.requires_grad}", output)
            if x.requires_grad:
                with p.backward():
                    sum((output * number).sum() for number, output in enumerate(outputs, 1)).backward()

    body.__name__ = f"aot_in_place_{name}"
    body.__doc__ = (
        f"An operation in place keeps the layout of its tensor, and views see what was written: {name}."
    )
    scenario(tags=TAGS)(body)


for _layout_name, _layout in LAYOUTS.items():
    for _operation_name, _operation in OPERATIONS.items():
        _register(f"{_operation_name}_{_layout_name}", _layout, _operation)


def _windows(p: Probe, size: int, step: int) -> None:
    def run(x: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        base = x * 1
        windows = base.unfold(0, size, step)
        windows.mul_(3)
        given.unfold(-1, size, step).add_(1)
        return base, windows

    x, given = p.leaf("x", p.randn(7, requires_grad=True)), p.watch("given", p.randn(2, 7))
    base, windows = p.compile(run)(x, given)
    p.value("windows", windows)
    with p.backward():
        (base * base).sum().backward()


@scenario(tags=TAGS)
def aot_windows_with_gaps_are_changed(p: Probe) -> None:
    """A change through windows leaves alone what stands between them."""
    _windows(p, 2, 3)


@scenario(tags=TAGS)
def aot_windows_that_end_early_are_changed(p: Probe) -> None:
    """A change through windows leaves alone what stands behind the last one."""
    _windows(p, 2, 2)


@scenario(tags=TAGS)
def aot_list_with_a_tensor_twice_is_changed(p: Probe) -> None:
    """An operation on a list changes a tensor that stands there twice two times."""
    given = p.watch("given", p.randn(3))

    def run(x: Tensor, given: Tensor) -> Tensor:
        made = x * 1
        torch._foreach_add_([made, made], 2.0)
        torch._foreach_mul_([given, given], 3.0)
        torch._foreach_add_([made[:2], made[1:]], 1.0)
        return made

    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(run)(x, given)
    p.value("out", out)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_list_of_parts_is_changed(p: Probe) -> None:
    """An operation on a list of the parts of one tensor changes each."""

    def run(x: Tensor) -> Tensor:
        made = x * 1
        torch._foreach_mul_([made[:2], made[2:]], 3.0)
        return made

    x = p.leaf("x", p.randn(4, requires_grad=True))
    with p.backward():
        p.compile(run)(x).sin().sum().backward()


@scenario(tags=("compiled", "aot", "views"))
def aot_view_of_a_view_under_no_grad(p: Probe) -> None:
    """A view that is made under no_grad is a leaf: a view of it has that history, not the input's."""

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = x.view_as(x)
        return inner.mT

    x = p.leaf("x", p.randn(2, 2, requires_grad=True))
    out = p.compile(run)(x)
    p.event("history", out.requires_grad, out.grad_fn is not None)
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "aot", "views", "hooks"))
def aot_view_is_returned_twice(p: Probe) -> None:
    """A view of an input, or of a result, returned twice is one tensor: a hook on either is called."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        made = x * 2
        one, two = x.t(), made.t()
        return one, one, two, made, two

    x = p.leaf("x", p.randn(2, 2, requires_grad=True))
    one, again, two, _, twice = p.compile(run)(x)
    p.event("same", one is again, two is twice, one is two)
    again.register_hook(p.hook("again"))
    twice.register_hook(p.hook("twice"))
    with p.backward():
        (one.sum() + two.sin().sum()).backward()


def _behind_the_start(p: Probe, given: Tensor) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        before = x[1:]
        x.add_(1)
        return before, x[1:], x.reshape(-1)

    for number, output in enumerate(p.compile(run)(given)):
        p.value(f"view {number}", output)
    p.value("given", given)


@scenario(tags=TAGS)
def aot_input_behind_the_start_of_its_memory_is_changed(p: Probe) -> None:
    """A view that is taken after a change of an input shows the input's own elements, wherever it begins."""
    _behind_the_start(p, p.randn(3, 4)[1:])


@scenario(tags=TAGS)
def aot_input_with_gaps_is_changed(p: Probe) -> None:
    """The same of an input with gaps."""
    _behind_the_start(p, p.randn(3, 8)[:, ::2])


@scenario(tags=TAGS)
def aot_expanded_input_is_changed(p: Probe) -> None:
    """An expanded input can be filled with one number."""

    def run(x: Tensor) -> Tensor:
        x.fill_(2.0)
        return x * 3

    given = p.randn(1, 3).expand(2, 3)
    p.value("out", p.compile(run)(given))
    p.value("given", given)


OVERLAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "an expanded row": lambda t: t.new_zeros(1, 4).expand(3, 4),
    "an expanded row of an input": lambda t: t[1:2].expand(3, 4),
    "an expanded result": lambda t: (t[:1] * 2).expand(3, 4),
    "expanded twice": lambda t: (t.sum() * 0).expand(3, 4),
}


PUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda into, there, some: into.index_put((there,), some),
    "accumulated": lambda into, there, some: into.index_put((there,), some, accumulate=True),
    "index_add": lambda into, there, some: into.index_add(0, there, some),
    "index_copy": lambda into, there, some: into.index_copy(0, there, some),
    "index_fill": lambda into, there, some: into.index_fill(0, there, 2.0),
    "scatter_add": lambda into, there, some: into.scatter_add(0, there.expand(4, 2).t(), some),
    "select_scatter": lambda into, there, some: into.select_scatter(some[0], 0, 1),
    "slice_scatter": lambda into, there, some: into.slice_scatter(some, 0, 1, 3),
}


@scenario(tags=TAGS)
def aot_what_is_put_into_overlapping_memory(p: Probe) -> None:
    """A functional call copies memory that shows an element in several places, and puts elements into one."""
    there = torch.tensor([1, 0])
    for name, put in PUT.items():

        def run(x: Tensor, put: Callable[[Tensor, Tensor, Tensor], Tensor] = put) -> list[Tensor]:
            return [put(overlap(x), there, x[there] + 1) for overlap in OVERLAPS.values()]

        x = p.leaf(name, p.randn(3, 4).requires_grad_())
        outputs = p.compile(run)(x)
        p.value(name, [output.detach() for output in outputs])
        p.event(name, *[layout(output) for output in outputs])
        with p.backward():
            torch.stack([output.square().sum() for output in outputs]).sum().backward()


#: what is written through a view, by more than a slice of it; functional forms, of which code makes writes.
_VIEWED: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: torch.as_strided_scatter(x, x.new_zeros(4, 1, 2), (4, 1, 2), (4, 3, 1)),
    "diagonal": lambda x: torch.diagonal_scatter(x, x.diagonal() * 3),
}

#: what is put in place of what a mask names.
_FILLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "elements": lambda x, mask: x.index_put_((mask,), torch.tensor(5.0, dtype=x.dtype, device=x.device)),
    "rows": lambda x, mask: x.index_put_((mask[0],), torch.tensor(5.0, dtype=x.dtype, device=x.device)),
    "added": lambda x, mask: x.index_put_((mask,), torch.ones((1,), dtype=x.dtype, device=x.device), True),
}


@scenario(tags=TAGS)
def aot_filled_by_a_mask_behind_what_a_view_wrote(p: Probe) -> None:
    """A fill by a mask keeps what was written through a view of the same memory, and its gradient too."""
    mask = torch.arange(16, device=p.device).view(4, 4) % 3 == 1
    for written, filled in itertools.product(_VIEWED, _FILLED):

        def run(x: Tensor, written: str = written, filled: str = filled) -> tuple[Tensor, Tensor]:
            changed, other = _VIEWED[written](x * 1), x * 2
            _FILLED[filled](changed, mask)
            other[mask] = 0  # behind that of what a view writes next, its backward is such a fill
            return changed * 2, _VIEWED[written](other)

        x = p.leaf(f"{written} {filled}", p.randn(4, 4, requires_grad=True))
        outputs = p.compile(run)(x)
        p.value(f"{written} {filled}", [output.detach() for output in outputs])
        with p.backward():
            (outputs[0] + outputs[1]).sum().backward()


#: of images of a few elements, in the memory format channels last: by name, channels, sizes, and the size of
#: a kernel.
_SMALL = {"one_element": (8, (1, 1), 1), "one_channel": (1, (4, 4), 3), "one_volume": (8, (1, 1, 1), 1)}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu_(),
    "relu6": lambda x: functional.relu6(x, inplace=True),
    "sigmoid": lambda x: x.sigmoid_(),
    "silu": lambda x: functional.silu(x, inplace=True),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1, inplace=True),
    "scaled": lambda x: x.mul_(torch.ones_like(x[:1]) * 2),
    "absolute": lambda x: x.abs().add_(1),
}


@scenario(tags=(*TAGS, "module"))
def aot_activation_in_place_of_small_images(p: Probe) -> None:
    """An activation in place keeps strides of dimensions of one element, by which a convolution lays out."""
    for small, activation in itertools.product(_SMALL, _ACTIVATIONS):
        channels, sizes, kernel = _SMALL[small]
        convolve = functional.conv3d if len(sizes) == 3 else functional.conv2d
        last = torch.channels_last_3d if len(sizes) == 3 else torch.channels_last

        def run(
            x: Tensor,
            first: Tensor,
            second: Tensor,
            convolve: Any = convolve,
            padding: int = kernel // 2,
            activation: str = activation,
        ) -> tuple[Tensor, Tensor]:
            hidden = _ACTIVATIONS[activation](convolve(x, first, padding=padding))
            return hidden, convolve(hidden, second, padding=padding)

        kernels = [kernel] * len(sizes)
        shapes = ((2, 4, *sizes), (channels, 4, *kernels), (4, channels, *kernels))
        given = [p.randn(*shape).to(memory_format=last).requires_grad_() for shape in shapes]
        given = [p.leaf(f"{small} {activation} {i}", one) for i, one in enumerate(given)]
        hidden, out = p.compile(run)(*given)
        p.value(f"{small} {activation}", [hidden.detach(), out.detach()])
        with p.backward():
            out.sum().backward()
