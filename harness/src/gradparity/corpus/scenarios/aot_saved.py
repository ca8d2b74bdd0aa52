"""Tensors that change before the backward of functions compiled ahead: an error if they were saved.

In: a probe, whose `compile` is the identity for eager. Out: eager's RuntimeError, or gradients where
nobody saved what was changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "in-place")


@scenario(tags=(*TAGS, "errors"))
def aot_saved_parameter_changed(p: Probe) -> None:
    """A weight that is changed between forward and backward was saved for its input's gradient: an error."""
    x, w = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xw")
    out = p.compile(lambda a, b: (a * b).sum())(x, w)
    with torch.no_grad():
        w.add_(1)
    with p.backward():
        out.backward()


@scenario(tags=TAGS)
def aot_parameter_changed_that_nobody_saved(p: Probe) -> None:
    """A bias, and the weight of a first layer whose input needs no gradient, are not saved: no error."""
    model = p.module(nn.Linear(3, 2))
    out = p.compile(model)(p.randn(4, 3))
    with torch.no_grad():
        model.bias.add_(1)
        model.weight.mul_(2)
    with p.backward():
        out.square().sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_saved_output_changed(p: Probe) -> None:
    """The result of `exp` is what its backward needs: changing it is an error."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: a.exp())(x)
    out.mul_(2)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_output_changed_that_nobody_saved(p: Probe) -> None:
    """The result of `sin` is not needed by its backward: it may be changed."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: a.sin())(x)
    out.mul_(2)
    with p.backward():
        out.square().sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_saved_through_a_view_changed(p: Probe) -> None:
    """A saved view of an input: changing the input's other rows is an error too, for they share a version."""
    x, table = p.leaf("x", p.randn(3, requires_grad=True)), p.randn(2, 3)
    out = p.compile(lambda a, t: a * t[0])(x, table)
    table[1] = 0
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_copy_saved_and_original_changed(p: Probe) -> None:
    """Of a buffer only a copy was saved: the buffer may change."""
    x, table = p.leaf("x", p.randn(3, 2, requires_grad=True)), p.randn(2, 3)
    out = p.compile(lambda a, t: a * t.t().clone())(x, table)
    table.zero_()
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_only_the_sign_was_saved(p: Probe) -> None:
    """Of an input only a comparison was saved: the input may change."""
    x, other = p.leaf("x", p.randn(4, requires_grad=True)), p.randn(4)
    out = p.compile(lambda a, b: torch.where(b > 0, a, -a))(x, other)
    other.neg_()
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_indices_changed(p: Probe) -> None:
    """Indices of a lookup are saved: changing them is an error."""
    table, where = p.leaf("table", p.randn(4, 2, requires_grad=True)), p.tensor([1, 3])
    out = p.compile(lambda t, i: t[i])(table, where)
    where.zero_()
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_buffer_changed_by_the_next_call(p: Probe) -> None:
    """A statistic that the forward moves in place was not saved: two forwards before two backwards."""
    model = p.module(nn.BatchNorm1d(3))
    run = p.compile(model)
    outs = [run(p.randn(4, 3)) for _ in range(2)]
    with p.backward():
        for out in outs:
            out.square().sum().backward()
    p.value("mean", model.running_mean)


@scenario(tags=(*TAGS, "errors"))
def aot_buffer_saved_and_changed_by_the_next_call(p: Probe) -> None:
    """A buffer that the forward saves and the next forward moves: the first backward is an error."""
    x, state = p.leaf("x", p.randn(3, requires_grad=True)), p.rand(3)

    def run(a: Tensor, s: Tensor) -> Tensor:
        s.mul_(0.5)
        return a * s

    call = p.compile(run)
    first, second = call(x, state), call(x, state)
    with p.backward():
        second.sum().backward()
        p.event("second done")
        first.sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_changed_inside_after_it_was_saved(p: Probe) -> None:
    """An input that the function itself changes after it was saved: the backward is an error, as in eager."""
    x, state = p.leaf("x", p.randn(3, requires_grad=True)), p.rand(3)

    def run(a: Tensor, s: Tensor) -> Tensor:
        out = a * s
        s.add_(1)
        return out

    out = p.compile(run)(x, state)
    p.value("state", state)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_data_of_a_saved_tensor_changed(p: Probe) -> None:
    """Changing a saved input through `.data` is not noticed: the backward computes with the new values."""
    x, w = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xw")
    out = p.compile(lambda a, b: (a * b).sin())(x, w)
    w.data.mul_(2)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_what_the_errors_say(p: Probe) -> None:
    """What a changed tensor, a freed graph and an unused input are refused with begins with eager's words."""
    x, w = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xw")
    call = p.compile(lambda a, b: ((a * b).exp(), b.sin()))

    def refused(name: str, *roots: Tensor, **inputs: Any) -> None:
        try:
            with p.backward():
                torch.autograd.grad([root.sum() for root in roots], **inputs)
        except RuntimeError as error:
            p.event(name, str(error).split(":")[0].split(".")[0])

    changed, _ = call(x, w)
    changed.mul_(2)
    refused("changed", changed, inputs=[x])
    first, second = call(x, w)
    refused("unused", second, inputs=[x])
    refused("sound", first, inputs=[x])
    refused("freed", first, inputs=[x])
    refused("no leaf", call(x.detach(), w.detach())[0], inputs=[x])


@scenario(tags=TAGS)
def aot_changed_after_the_backward(p: Probe) -> None:
    """After the backward everything may be changed; the next step computes with it."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    x = p.randn(3)
    call = p.compile(lambda a, b: functional.softplus(a * b))
    for step in range(3):
        with p.backward():
            call(x, w).sum().backward()
        p.value(f"grad{step}", w.grad)
        with torch.no_grad():
            w.sub_(w.grad)
            x.add_(1)


@scenario(tags=(*TAGS, "errors"))
def aot_returned_intermediate_changed(p: Probe) -> None:
    """An intermediate that is returned, and was saved for the next operation, is changed: an error."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        hidden = a * 2
        return hidden, hidden.sin()

    hidden, out = p.compile(run)(x)
    hidden.add_(1)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_returned_intermediate_changed_that_nobody_saved(p: Probe) -> None:
    """One that was not saved may be changed; its own gradient is that of the new value."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        hidden = a * 2
        return hidden, hidden + 1

    hidden, out = p.compile(run)(x)
    hidden.mul_(3)
    with p.backward():
        (out + hidden).square().sum().backward()


@scenario(tags=TAGS)
def aot_equal_results_of_which_one_is_changed(p: Probe) -> None:
    """Two results that are computed alike have memory of their own: one is changed, the other was saved."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    first, second = p.compile(lambda a: (a.exp(), a.exp()))(x)
    first.mul_(2)
    p.value("second", second)
    with p.backward():
        second.sum().backward()


@scenario(tags=TAGS)
def aot_equal_values_of_which_one_is_returned(p: Probe) -> None:
    """A value that is returned is changed; one that is computed alike inside was saved, and is not."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shown, returned, inside = (a * 2 for _ in range(3))
        return shown.view(6), returned, inside.sin()

    shown, returned, out = p.compile(run)(x)
    shown.add_(1)
    returned.mul_(3)
    with p.backward():
        (out + returned + shown.view(2, 3)).sum().backward()


@scenario(tags=TAGS)
def aot_calls_that_only_look_equal(p: Probe) -> None:
    """Products with 0.0 and -0.0, differences both ways, and two drawings are not one value."""
    x, y = (p.leaf(name, p.randn(4, requires_grad=True)) for name in "xy")

    def run(a: Tensor, b: Tensor) -> Tensor:
        zeros = [torch.copysign(a, b.detach().abs() * zero) for zero in (0.0, -0.0)]
        differences = [torch.sub(*both) for both in ((a, b), (b, a))]
        drawn = [functional.dropout(a * b, 0.5) for _ in range(2)]
        return (zeros[0] * differences[0] * drawn[0] - zeros[1] * differences[1].exp() * drawn[1]).sum()

    out = p.compile(run)(x, y)
    with p.backward():
        out.backward()


@scenario(tags=(*TAGS, "autocast"))
def aot_one_activation_cast_for_three_layers(p: Probe) -> None:
    """Autocast casts an activation for each layer that reads it; its gradient adds up in float32."""
    model = p.module(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    x = p.leaf("x", p.randn(5, 4, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = functional.layer_norm(a, (4,))
            q, k, v = (layer(hidden) for layer in model)
            return ((q @ k.mT).softmax(-1) @ v).float().square().mean()

    out = p.compile(run)(x)
    with p.backward():
        out.backward()
