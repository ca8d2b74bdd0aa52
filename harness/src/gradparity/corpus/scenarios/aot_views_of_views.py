"""Views of views among the outputs of a function compiled ahead: which elements a gradient comes to.

In: a probe, whose `compile` is the identity for eager. Out: gradients of the views, of those between
them and their base, and of the base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.aot_viewed import BASES, TAGS, VIEWS
from gradparity.probe import Probe

Map = Callable[[Tensor], Tensor]

#: parts of a matrix of 3 x 4, and windows of the memory of these, which see more than the part has.
PARTS: dict[str, Map] = {
    "narrow": lambda t: t.view(-1).narrow(0, 4, 2),
    "gaps": lambda t: t.view(-1)[3:9:2],
    "column": lambda t: t[:, 1],
    "transposed": lambda t: t.t()[1:3],
    "diagonal": lambda t: t.diagonal(),
    "expanded": lambda t: t[1, :1].expand(3),
    "everything": lambda t: t.view(-1),
}
WINDOWS: dict[str, Map] = {
    "behind": lambda t: t.as_strided((1, 4), (1, 1)),
    "before": lambda t: torch.as_strided(t, (3,), (1,), 0),
    "between": lambda t: t.as_strided((2,), (2,), t.storage_offset()),
    "a part": lambda t: torch.as_strided(t, (1,), (1,)),
    "a view of it": lambda t: t.as_strided((6,), (1,), 3)[1:].view(5, 1),
}


@scenario(tags=TAGS)
def aot_strided_window_beside_a_view(p: Probe) -> None:
    """What a window shows beside the view that it was made of gets no gradient, whatever else is returned."""
    for of, base in BASES.items():
        for kind, part in PARTS.items():
            for name, window in WINDOWS.items():
                for count in range(3):

                    def run(x: Tensor, m: Any = (base, part, window), count: int = count) -> list[Tensor]:
                        value = m[0](x)
                        seen = m[1](value)
                        return [m[2](seen), *(value.view(-1), seen)[:count]]

                    x = p.leaf(f"{name} of {kind} of {of} {count}", p.randn(3, 4, requires_grad=True))
                    outputs = p.compile(run)(x)
                    with p.backward():
                        sum((output * p.rand(*output.shape)).sum() for output in outputs).backward()


@scenario(tags=TAGS)
def aot_strided_window_of_an_outer_tensor(p: Probe) -> None:
    """The window may be of a view of a tensor that the function reads besides its arguments."""
    outer = p.leaf("outer", p.randn(3, 4, requires_grad=True))
    for kind, part in PARTS.items():
        for name, window in WINDOWS.items():

            def run(x: Tensor, part: Map = part, window: Map = window) -> tuple[Tensor, Tensor]:
                return window(part(outer)), outer.view(-1) + x

            outputs = p.compile(run)(p.randn(1))
            p.value(f"{name} of {kind}", [output.detach() for output in outputs])
            with p.backward():
                sum((output * p.rand(*output.shape)).sum() for output in outputs).backward()


#: views of views, of any shape and dtype.
AGAIN: dict[str, Map] = {
    "a part": lambda t: t[..., :1],
    "one more dimension": lambda t: t.unsqueeze(0),
    "more of it": lambda t: t.expand(2, *t.shape),
    "turned": lambda t: t.movedim(0, -1),
    "the first": lambda t: t.as_strided((1,), (1,)),
    "the real part": lambda t: t.real[:1],
    "conjugated": lambda t: t.conj()[:1],
}


def _in_order(grad: Tensor) -> Tensor:
    """The elements of a gradient, without its layout."""
    return grad.clone(memory_format=torch.contiguous_format)


@scenario(tags=TAGS)
def aot_view_of_each_view_output(p: Probe) -> None:
    """A gradient reaches a returned view from a view of it, if elements are shared or parts are taken too."""
    bases = [*BASES.items()]
    for dtype in ("float32", "complex64"):
        leaf = p.leaf(f"x {dtype}", p.randn(3, 4, dtype=dtype, requires_grad=True))
        for i, (kind, first) in enumerate(VIEWS.items()):
            for j, (again, second) in enumerate(AGAIN.items()):
                of, base = bases[(i + j) % len(bases)]  # each pair of neighbours, not each three

                def run(x: Tensor, maps: Any = (base, first, second)) -> tuple[Tensor, Tensor]:
                    seen = maps[1](maps[0](x))
                    return seen, maps[2](seen)

                seen, more = p.compile(run)(leaf)
                with p.backward():
                    grads = torch.autograd.grad(more.abs().sum(), (seen, leaf))
                p.value(f"{again} of {kind} of {of} {dtype}", tuple(_in_order(grad) for grad in grads))
