"""Functions compiled ahead whose backward is made by running the call again.

In: a probe, whose `compile` is the identity for eager. Out: gradients, which are differentiated themselves,
come in batches, or begin at cotangents that lie otherwise than in the trace. One scenario for each function
and each of these. The numbers are small and whole, so that no sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "higher-order")

Several = tuple[Tensor, ...]


def _changed(h: Tensor, k: Tensor) -> Several:
    h.add_(1)
    return h * k, k * 2, h * h * k


def _changed_unseen(h: Tensor, k: Tensor) -> Several:
    with torch.no_grad():
        h.add_(1)
    return h * k, k * k, h * 2


def _enlarged(h: Tensor, k: Tensor) -> Several:
    large = functional.interpolate(h, scale_factor=2.0)
    return large * large, h * k, functional.interpolate(k, size=h.shape[2:]) * h.sum()


def _shared(h: Tensor, k: Tensor) -> Several:
    both = h * k
    return both * h, both * 2, both.transpose(-1, -2) * 3


def _shrunk(h: Tensor, k: Tensor) -> Several:
    small = functional.hardshrink(h, 1.0) + functional.softshrink(k, 1.0)
    return small * h, small * 2, functional.relu6(small) * k


#: of two inputs that are no leaves, and of which each is read on the way to several results.
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Several]] = {
    "that_changes_an_input": _changed,
    "that_changes_an_input_unseen": _changed_unseen,
    "of_images_that_are_enlarged": _enlarged,
    "with_a_value_in_several_results": _shared,
    "of_numbers_that_are_shrunk": _shrunk,
}


def _differentiated(outputs: Several, inputs: list[Tensor], cotangents: Several) -> None:
    grads = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()


def _in_batches(outputs: Several, inputs: list[Tensor], cotangents: Several) -> None:
    batches = [torch.stack([one, one * 2]) for one in cotangents]
    for leaf, grad in zip(
        inputs, torch.autograd.grad(outputs, inputs, batches, is_grads_batched=True), strict=True
    ):
        leaf.grad = grad.sum(0)


def _laid_out_otherwise(outputs: Several, inputs: list[Tensor], cotangents: Several) -> None:
    turned = [one.transpose(0, -1).contiguous().transpose(0, -1) for one in cotangents]
    torch.autograd.backward(outputs, turned)


REQUESTS: dict[str, Callable[[Several, list[Tensor], Several], None]] = {
    "differentiated_twice": _differentiated,
    "in_batches": _in_batches,
    "with_cotangents_laid_out_otherwise": _laid_out_otherwise,
}


def _register(program: str, request: str) -> None:
    def body(p: Probe) -> None:
        call = p.compile(PROGRAMS[program])
        x, y = (p.leaf(name, _whole(p, shift)) for name, shift in (("x", 0), ("y", 1)))
        outputs = call(x * 1, y * 1)
        cotangents = tuple([torch.ones_like(out).cumsum(-1) - 2 for out in outputs])
        with p.backward():
            REQUESTS[request](outputs, [x, y], cotangents)

    body.__name__ = f"aot_function_{program}_{request}"
    body.__doc__ = f"A function {program}, {request}: {__doc__.splitlines()[0]}".replace("_", " ")
    scenario(tags=TAGS)(body)


def _whole(p: Probe, shift: int) -> Tensor:
    numbers = (torch.arange(36) + shift) % 5 - 2
    return numbers.reshape(2, 2, 3, 3).to(p.dtype).requires_grad_()


for _program in PROGRAMS:
    for _request in REQUESTS:
        _register(_program, _request)
