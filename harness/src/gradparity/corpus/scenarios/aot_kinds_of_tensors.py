"""Inputs of functions compiled ahead that are not matrices of floats: integers, complex, scalars, nothing.

In: a probe, whose `compile` is the identity for eager. Out: gradients of the right kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "dtype")


@scenario(tags=TAGS)
def aot_integer_and_boolean_inputs(p: Probe) -> None:
    """Indices and masks among the arguments and among the outputs have no gradients."""
    table = p.leaf("table", p.randn(5, 3, requires_grad=True))

    def run(t: Tensor, where: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = t[where]
        return rows.masked_fill(mask, 0.0), rows.argmax(1), rows > 0

    rows, largest, positive = p.compile(run)(table, p.randint(5, 4), p.rand(4, 3) > 0.5)
    p.value("others", (largest, positive))
    p.event("requires grad", rows.requires_grad, largest.requires_grad, positive.requires_grad)
    with p.backward():
        (rows * positive).sum().backward()


@scenario(tags=TAGS)
def aot_complex_input(p: Probe) -> None:
    """A complex leaf, with conjugate views on the way, gets a complex gradient."""
    z = torch.complex(p.randn(3), p.randn(3)).requires_grad_()
    p.leaf("z", z)
    out = p.compile(lambda a: (a * a.conj() + a.exp()).real)(z)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_complex_output_and_cotangent(p: Probe) -> None:
    """A complex output takes a complex cotangent, a conjugated one too."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    z = p.compile(lambda a: torch.polar(a.exp(), a))(x)
    with p.backward():
        z.backward(torch.complex(p.randn(3), p.randn(3)), retain_graph=True)
        z.backward(torch.complex(p.randn(3), p.randn(3)).conj())


@scenario(tags=TAGS)
def aot_conjugate_output(p: Probe) -> None:
    """An output that is a lazily conjugated view is one after compiling too."""
    z = p.leaf("z", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    out = p.compile(lambda a: (a * 2).conj())(z)
    p.event("conjugate", out.is_conj())
    with p.backward():
        out.imag.sum().backward()


@scenario(tags=TAGS)
def aot_scalars(p: Probe) -> None:
    """Tensors without dimensions, and Python numbers of both kinds."""
    x, y = (p.leaf(name, p.tensor(value, requires_grad=True)) for name, value in (("x", 0.5), ("y", 2.0)))
    call = p.compile(lambda a, b, n, f: (a * n + f) ** b)
    for step, (n, f) in enumerate(((2, 0.5), (3, 1.5), (2, 0.5))):
        with p.backward():
            call(x, y, n, f).backward()
        p.value(f"grads{step}", (x.grad, y.grad))


@scenario(tags=TAGS)
def aot_empty_tensors(p: Probe) -> None:
    """Tensors without elements get gradients without elements."""
    x, y = p.leaf("x", p.randn(0, 3, requires_grad=True)), p.leaf("y", p.randn(3, requires_grad=True))
    out = p.compile(lambda a, b: (a * b).sum(0))(x, y)
    with p.backward():
        (out + y).sum().backward()


@scenario(tags=TAGS, fp64=False)
def aot_several_precisions(p: Probe) -> None:
    """float64, bfloat16 and float32 leaves in one function get gradients in their own precisions."""
    x, y, z = (
        p.leaf(name, p.randn(3).to(dtype).requires_grad_())
        for name, dtype in (("x", torch.float64), ("y", torch.bfloat16), ("z", torch.float32))
    )
    out = p.compile(lambda a, b, c: (a * b).to(torch.float32) + (b * c) * a)(x, y, z)
    p.event("dtype", str(out.dtype))
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS, fp64=False)
def aot_dtype_changes_between_calls(p: Probe) -> None:
    """One compiled function called with float32, float64, bfloat16 and float32 again."""
    call = p.compile(lambda a: a.sin().cumsum(0))
    for step, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float32)):
        x = p.leaf(f"x{step}", p.randn(3).to(dtype).requires_grad_())
        with p.backward():
            call(x).sum().backward()


@scenario(tags=TAGS)
def aot_some_inputs_without_gradients(p: Probe) -> None:
    """Which of three inputs require grad changes from call to call."""
    call = p.compile(lambda a, b, c: a.sin() * b.exp() + c * a)
    for step, pattern in enumerate(("yyy", "yny", "nny", "yyn", "nny")):
        leaves = [
            p.leaf(f"{step}{name}", p.randn(3, requires_grad=flag == "y"))
            for name, flag in zip("abc", pattern, strict=True)
        ]
        out = call(*leaves)
        with p.backward():
            out.sum().backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_no_input_requires_grad(p: Probe) -> None:
    """Without any input that requires grad the outputs require none; then one does."""
    a, w = p.randn(3), p.leaf("w", p.randn(3))
    call = p.compile(lambda x, y: (x * y).tanh())
    p.event("first", call(a, w).requires_grad)
    w.requires_grad_()
    out = call(a, w)
    p.event("second", out.requires_grad)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_intermediate_and_leaf_in_turn(p: Probe) -> None:
    """The argument is a leaf, an intermediate, and a detached one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda a: a.sin() * 2)
    for step, argument in enumerate((x, x * 2, (x * 2).detach(), x.exp())):
        out = call(argument)
        p.event(f"out{step}", out.requires_grad, out.is_leaf)
        if out.requires_grad:
            with p.backward():
                out.sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_loss_functions(p: Probe) -> None:
    """Several losses over integer targets and float ones, added up in one compiled function."""
    scores, target = p.leaf("scores", p.randn(4, 3, requires_grad=True)), p.randint(3, 4)

    def run(s: Tensor, t: Tensor) -> Tensor:
        soft = functional.one_hot(t, 3).to(s.dtype)
        return (
            functional.cross_entropy(s, t, label_smoothing=0.1)
            + functional.binary_cross_entropy_with_logits(s, soft)
            + functional.smooth_l1_loss(s, soft)
            + functional.kl_div(s.log_softmax(1), soft, reduction="batchmean")
        )

    loss = p.compile(run)(scores, target)
    p.value("loss", loss)
    with p.backward():
        loss.backward()


@scenario(tags=TAGS)
def aot_multi_output_operations(p: Probe) -> None:
    """Operations with several outputs, of which some are used, some returned, some neither."""
    x = p.leaf("x", p.randn(4, 4, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        values, places = a.sort(1)
        q, r = torch.linalg.qr(a + 4 * torch.eye(4, dtype=a.dtype, device=a.device))
        top, _ = values.topk(2, 1)
        _, two = r.split(2)
        return top.sum() + two.square().sum() + q.diagonal().sum(), places

    loss, places = p.compile(run)(x)
    p.value("places", places)
    with p.backward():
        loss.backward()


class _Doubled(Tensor):
    """A plain tensor of which a sine is twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.sin else found


class _Weight(nn.Parameter):
    """A parameter that a model asks for more than its elements."""

    def halved(self) -> Tensor:
        return self / 2


class _Asking(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight.halved() if isinstance(self.weight, _Weight) else 1.0)


@scenario(tags=TAGS)
def aot_tensors_of_a_class_of_the_users_own(p: Probe) -> None:
    """What the class of an input does in Python is done: alone, in turn with plain ones, and closed over."""
    call, closed = p.compile(lambda a: torch.sin(a) * a), p.randn(3).as_subclass(_Doubled)
    for step in range(3):
        x = p.leaf(f"x{step}", p.randn(3, requires_grad=True))
        out = call(x * 1 if step != 1 else (x * 1).as_subclass(_Doubled))
        p.event(f"class {step}", type(out).__name__)
        with p.backward():
            out.sum().backward()
    p.value("closed over", p.compile(lambda a: torch.sin(closed) + a)(p.randn(3)).as_subclass(Tensor))


@scenario(tags=TAGS)
def aot_parameter_of_a_class_of_the_users_own(p: Probe) -> None:
    """A module asks its parameter what it is, and calls a method of it."""
    model = p.module(_Asking(_Weight(p.randn(3))))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        p.compile(model)(x).sum().backward()
