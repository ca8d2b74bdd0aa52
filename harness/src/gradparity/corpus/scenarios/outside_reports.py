"""What programs from outside showed: texts of errors, identities, arguments from elsewhere, changed inputs.

In: a probe, whose `compile` is the identity for eager. Out: gradients, errors with their text, warnings. One
scenario for each kind of saved tensor that a hook changes; the others stand alone.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.function_contracts import Exponential
from gradparity.probe import Probe

COMPILED = ("compiled", "aot")

#: what a product saves: from a leaf, the tensor that is saved, and the tensor of which the version rises.
SAVED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "leaf": lambda x: (x, x),
    "sum": lambda x: ((result := x + 1), result),
    "exponential": lambda x: ((result := x.exp()), result),
    "view": lambda x: ((base := x * 2).t(), base),
    "row": lambda x: ((base := x * 2)[:1], base),
    "function": lambda x: ((result := Exponential.apply(x)), result),
    "determinant": lambda x: ((result := torch.linalg.det(x)), result),
    "changed_in_place": lambda x: ((result := x.clone().mul_(3)), result),
}


def _register_saved(kind: str) -> None:
    def body(p: Probe) -> None:
        x, w = p.leaf("x", p.randn(3, 3, requires_grad=True)), p.leaf("w", p.randn(1, requires_grad=True))
        saved, shared = SAVED[kind](x)
        y = saved * w
        y.register_hook(lambda _: torch.autograd.graph.increment_version(shared))
        try:
            with p.backward():
                y.sum().backward()
        except RuntimeError as error:
            p.event("error", str(error).split(" Hint:")[0])

    body.__name__ = f"error_names_what_made_a_saved_{kind}"
    body.__doc__ = f"The error for a saved tensor that a hook changed names its operation ({kind})."
    scenario(tags=("saved", "hooks"))(body)


for _kind in SAVED:
    _register_saved(_kind)


class Asks(torch.autograd.Function):
    """Its backward compares its context with nodes, and looks things up by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, known: dict[Any, int], record: Callable[..., Any]) -> Tensor:
        ctx.known, ctx.record = known, record
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        node = torch._C._current_autograd_node()
        ctx.record("equal", ctx == node, ctx != node, ctx in list(ctx.known), ctx in set(ctx.known))
        ctx.record("found", ctx.known.get(ctx), torch._C._will_engine_execute_node(ctx))
        return grad * 3, None, None


@scenario(tags=("function",))
def context_is_equal_to_its_node(p: Probe) -> None:
    """A backward finds its own node by its context: by comparison, in a list, in a set, in a dictionary."""
    x, known = p.leaf("x", p.randn(3, requires_grad=True)), dict[Any, int]()
    first = Asks.apply(x, known, p.event)
    second = Asks.apply(first.sin(), known, p.event)
    known.update({first.grad_fn: 1, second.grad_fn: 2})
    with p.backward():
        second.sum().backward()


@scenario(tags=("hooks", "accumulation"))
def two_kinds_of_nan_meet(p: Probe) -> None:
    """Of two NaNs that are added, the sum keeps the bits of the one that eager gives first."""
    x = p.leaf("x", p.randn(1, requires_grad=True))
    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00001, 0x7FC00002)]
    roots = [x.view(1), x.clone(), x * 1]
    with p.backward():
        torch.autograd.backward(roots, [p.cast(nan) for nan in (*nans, nans[0])])


@scenario(tags=("higher-order",))
def warning_of_backward_with_create_graph(p: Probe) -> None:
    """`backward(create_graph=True)` warns of the cycle that it makes."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with p.backward():
                x.sin().sum().backward(create_graph=True)
    finally:
        torch.set_warn_always(before)
    p.event("warned", *sorted({one.category.__name__ for one in caught}))
    x.grad = x.grad.detach() if x.grad is not None else None


@scenario(tags=COMPILED)
def aot_array_of_numpy_as_argument(p: Probe) -> None:
    """An array is given in two calls, then another one of the same size, then the first with other values."""
    x, array = p.leaf("x", p.randn(3, requires_grad=True)), np.arange(3.0)
    call = p.compile(lambda a, b: (a * torch.from_numpy(b).to(a.dtype)).sum() * float(b[1]))
    for step, given in enumerate((array, array, array + 1, array)):
        if step == 3:
            array += 5
        with p.backward():
            call(x, given).backward()
        p.value(f"grad{step}", x.grad)


@dataclasses.dataclass
class Box:
    """Tensors with a number, in a class that is registered nowhere."""

    value: Tensor
    factor: float


@scenario(tags=COMPILED)
def aot_dataclass_as_argument(p: Probe) -> None:
    """A dataclass that torch does not know as a container is given in several calls, with other contents."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda box: (box.value * box.factor).sin())
    for step, factor in enumerate((2.0, 2.0, 3.0)):
        with p.backward():
            call(Box(x * 1, factor)).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=COMPILED)
def aot_copy_of_a_compiled_module(p: Probe) -> None:
    """A deep copy of a compiled module has parameters of its own, before and after the first call."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    run = p.compile(model)
    for step in range(2):
        other = copy.deepcopy(run)
        with p.backward():
            run(p.randn(2, 3)).sum().backward()
            other(p.randn(2, 3)).sum().backward()
        p.value(f"copy{step}", tuple(parameter.grad for parameter in other.parameters()))


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    y.unfold(0, 2, 3).mul_(2)
    y.view(2, 3)[:, 1].add_(x[:2])
    return y.sin()


@scenario(tags=(*COMPILED, "func", "inplace"))
def aot_functionalized_inside(p: Probe) -> None:
    """A function that `functionalize` transforms writes through views; it is compiled as it is."""
    x, w = (p.leaf(name, p.randn(6, requires_grad=True)) for name in ("x", "w"))
    call = p.compile(lambda a, b: torch.func.functionalize(_in_place)(a, b) + a)
    for _ in range(2):
        with p.backward():
            call(x, w).sum().backward()


@scenario(tags=(*COMPILED, "func", "inplace"))
def aot_functionalized_around(p: Probe) -> None:
    """`functionalize` transforms a compiled function that writes through views."""
    x, w = (p.leaf(name, p.randn(6, requires_grad=True)) for name in ("x", "w"))
    call = torch.func.functionalize(p.compile(_in_place))
    for _ in range(2):
        with p.backward():
            call(x, w).sum().backward()


#: functions that change what they are given, of which the first has a history.
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda a, b: a.mul_(b).sin(),
    "activation": lambda a, b: nn.functional.leaky_relu(a, 0.1, inplace=True) * b,
    "row": lambda a, b: (a[0].add_(b[1]), a * a)[1],
    "both": lambda a, b: (a.mul_(2), b.add_(a), a * b)[2],
    "buffer": lambda a, b: (b.mul_(a), b * b)[1],
    "twice": lambda a, b: a.add_(b).mul_(2).sub_(1).sin() * b,
}
#: those that are given two parts of one tensor, which overlap.
OVERLAPPING = {"overlapping_scaled", "overlapping_shifted"}
CHANGES["overlapping_scaled"] = lambda a, b: (a.mul_(2), a.sin() * b)[1]
CHANGES["overlapping_shifted"] = lambda a, b: (b[1:].add_(1), a * a + b)[1]


def _second_derivative(p: Probe, out: Tensor, x: Tensor) -> None:
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    p.value("first", grad.detach())
    (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
    p.value("second", second)


def _under_autocast(p: Probe, out: Tensor, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out.pow(2).sum().backward()


def _kept(p: Probe, out: Tensor, x: Tensor) -> None:
    for layout in (out.detach().clone(), torch.zeros_like(out), out.detach()[:1].expand_as(out)):
        out.backward(layout, retain_graph=True)


def _batched(p: Probe, out: Tensor, x: Tensor) -> None:
    p.value("rows", torch.autograd.grad(out, x, p.randn(2, *out.shape), is_grads_batched=True)[0])


USES: dict[str, Callable[[Probe, Tensor, Tensor], None]] = {
    "differentiated_twice": _second_derivative,
    "under_autocast": _under_autocast,
    "with_a_kept_graph": _kept,
    "batched": _batched,
}


def _register_change(change: str, use: str) -> None:
    def body(p: Probe) -> None:
        x, w = (p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in ("x", "w"))
        call = p.compile(CHANGES[change])
        for step in range(2):
            hidden = x * 1
            given = (hidden[:2], hidden[1:]) if change in OVERLAPPING else (hidden, p.randn(3, 3))
            first, second = (p.watch(f"{place}{step}", one) for place, one in enumerate(given))
            out = call(first, second)
            with p.backward():
                USES[use](p, out if use == "batched" else out * w[: len(out)], x)

    body.__name__ = f"aot_input_changed_by_{change}_{use}"
    text = f"A function that changes an input with a history ({change}) is run backward {use}, as eager is."
    body.__doc__ = text.replace("_", " ")
    scenario(tags=(*COMPILED, "in-place", "higher-order"))(body)


for _change in CHANGES:
    for _use in USES:
        _register_change(_change, _use)


@scenario(tags=(*COMPILED, "subclass", "in-place"))
def aot_subclass_and_plain_input_changed_in_place(p: Probe) -> None:
    """A tensor and one of two parts are changed in place; the gradient of the plain one has two parts."""
    parts = (p.randn(2, 3, requires_grad=True), p.randn(2, 3, requires_grad=True))
    x, two = p.leaf("x", p.randn(2, 3, requires_grad=True)), p.leaf("two", TwoTensor(*parts))

    def run(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        b.mul_(3)
        return a + b

    call = p.compile(run)
    for _ in range(2):
        other = two + 1
        with p.backward():
            (other * call(x + 1, other)).sum().backward()


class Pools(nn.Module):
    """Convolutions with poolings of every kind, as residual networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(self.first(x).relu(), 3, stride=2, padding=1)
        h = nn.functional.avg_pool2d(self.second(h), 2)
        return nn.functional.adaptive_avg_pool2d(h, 1).flatten(1)


@scenario(tags=COMPILED)
def aot_poolings_of_images(p: Probe) -> None:
    """Maxima and means over windows, forward and backward, in two steps."""
    run = p.compile(p.module(Pools()))
    for _ in range(2):
        with p.backward():
            run(p.randn(2, 2, 10, 10)).pow(2).sum().backward()


@scenario(tags=COMPILED, fp64=False)
def aot_dropout_between_softmax_and_product(p: Probe) -> None:
    """Attention with dropout gives numbers, whichever mask is drawn; what the mask kept has a gradient."""
    call = p.compile(lambda a, b: nn.functional.dropout(a.softmax(-1), 0.1) @ b)
    a, b = p.randn(4, 2, 16, 16, requires_grad=True), p.randn(4, 2, 16, 8, requires_grad=True)
    out = call(a, b)
    with p.backward():
        out.sum().backward()
    p.value("shape", tuple(out.shape))
    for name, value in (("output", out), ("first", a.grad), ("second", b.grad)):
        p.invariant(f"the {name} is finite", value is not None and bool(value.isfinite().all()))
