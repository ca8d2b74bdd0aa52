"""Functions compiled ahead whose inputs change their sizes from call to call.

In: a probe, whose `compile` is the identity for eager. Out: values and gradients of each call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "shapes")


@scenario(tags=TAGS)
def aot_size_in_arithmetic(p: Probe) -> None:
    """A size takes part in the computation as a number, another one in each call."""
    x = p.leaf("x", p.randn(6, requires_grad=True))
    call = p.compile(lambda a: a.sin().sum() / a.shape[0] + a[: a.shape[0] // 2].sum() * len(a))
    for step, size in enumerate((6, 4, 5, 2)):
        with p.backward():
            call(x[:size]).backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_size_as_output(p: Probe) -> None:
    """A size, and a number computed from sizes, come out as plain numbers."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b: ((a * b).sum(), a.shape[0], a.numel() + 1))
    for step, size in enumerate((2, 5, 3)):
        out, rows, count = call(p.randn(size, 3), w)
        p.event(f"sizes{step}", rows, count, isinstance(rows, int), isinstance(count, int))
        with p.backward():
            out.backward()


@scenario(tags=TAGS)
def aot_number_of_dimensions_changes(p: Probe) -> None:
    """A vector, a matrix, a cube and a vector again through one function."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b: (a * b).softmax(-1).flatten().cumsum(0))
    for step, shape in enumerate(((3,), (2, 3), (2, 2, 3), (3,), (4, 3))):
        with p.backward():
            call(p.randn(*shape), w).square().sum().backward()
        p.value(f"grad{step}", w.grad)


@scenario(tags=TAGS)
def aot_sizes_nought_and_one(p: Probe) -> None:
    """Sizes 0 and 1, where broadcasting and reductions are special, between others."""
    x, w = p.leaf("x", p.randn(4, 3, requires_grad=True)), p.leaf("w", p.randn(1, 3, requires_grad=True))
    call = p.compile(lambda a, b: (a * b).sum(0, keepdim=True) + a.new_ones(a.shape[0], 3) @ b.t())
    for step, rows in enumerate((3, 1, 0, 4, 1, 0)):
        out = call(x[:rows], w)
        p.value(f"out{step}", out.detach())
        with p.backward():
            out.sum().backward()
        p.value(f"grads{step}", (x.grad, w.grad))


@scenario(tags=TAGS)
def aot_broadcast_in_one_call_only(p: Probe) -> None:
    """The same two arguments broadcast in every second call only, once the one and once the other."""
    call = p.compile(lambda a, b: (a * b).sin())
    for step, (one, other) in enumerate(((2, 2), (2, 1), (4, 4), (1, 4))):
        a = p.leaf(f"a{step}", p.randn(one, 3, requires_grad=True))
        b = p.leaf(f"b{step}", p.randn(other, 3, requires_grad=True))
        with p.backward():
            call(a, b).sum().backward()


@scenario(tags=TAGS)
def aot_branch_on_a_size(p: Probe) -> None:
    """A branch that depends on a size is taken by the size of each call."""
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sin() if a.shape[0] > 3 else (a + b).cos()

    call = p.compile(run)
    for step, rows in enumerate((2, 5, 3, 4, 2)):
        with p.backward():
            call(p.randn(rows, 3), w).sum().backward()
        p.value(f"grad{step}", w.grad)


@scenario(tags=TAGS)
def aot_two_sizes_that_were_equal(p: Probe) -> None:
    """Two sizes that were equal in the first call, and so might have been taken for one, differ later."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b, c: torch.cat([a * c, b * c]).sum(0) * a.shape[0])
    for step, (one, other) in enumerate(((4, 4), (5, 2), (3, 3), (1, 6))):
        with p.backward():
            call(p.randn(one, 3), p.randn(other, 3), w).sum().backward()
        p.value(f"grad{step}", w.grad)


@scenario(tags=TAGS)
def aot_strides_change_between_calls(p: Probe) -> None:
    """The same sizes, contiguous, transposed, stepped and expanded."""
    call = p.compile(lambda a: (a.sin() * a).sum(1))
    base = p.randn(4, 4)
    for step, made in enumerate((base, base.t(), p.randn(4, 8)[:, ::2], p.randn(1, 4).expand(4, 4), base)):
        x = p.leaf(f"x{step}", made.detach().requires_grad_())
        with p.backward():
            call(x).sum().backward()


@scenario(tags=TAGS)
def aot_attention_over_lengths(p: Probe) -> None:
    """An attention layer over sequences of several lengths, with a mask made from the length."""
    layer = p.module(nn.Linear(4, 12))

    def run(x: Tensor) -> Tensor:
        q, k, v = layer(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    call = p.compile(run)
    for step, (batch, length) in enumerate(((2, 3), (2, 5), (1, 4), (3, 1))):
        with p.backward():
            call(p.randn(batch, length, 4)).square().sum().backward()
        p.value(f"grad{step}", layer.weight.grad)


@scenario(tags=TAGS)
def aot_images_of_two_sizes(p: Probe) -> None:
    """Convolution, pooling and interpolation on images of other sizes."""
    weight = p.leaf("weight", p.randn(2, 1, 3, 3, requires_grad=True))

    def run(image: Tensor, w: Tensor) -> Tensor:
        h = functional.max_pool2d(functional.conv2d(image, w, padding=1), 2)
        return functional.interpolate(h, size=image.shape[2:], mode="bilinear")

    call = p.compile(run)
    for step, (height, width) in enumerate(((6, 6), (8, 5), (5, 8))):
        with p.backward():
            call(p.randn(1, 1, height, width), weight).square().mean().backward()
        p.value(f"grad{step}", weight.grad)


@scenario(tags=(*TAGS, "data-dependent"))
def aot_size_that_depends_on_values(p: Probe) -> None:
    """How many elements are left depends on their values: another number in each call."""
    x = p.leaf("x", p.randn(8, requires_grad=True))
    call = p.compile(lambda a, limit: a[a > limit].exp())
    for step, limit in enumerate((0.0, 0.5, -1.0)):
        out = call(x, limit)
        p.event(f"count{step}", out.numel())
        with p.backward():
            out.sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS)
def aot_dimension_marked_as_dynamic(p: Probe) -> None:
    """A dimension that the caller marks as dynamic changes from call to call."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b: (a * b).sum(0).tanh() * a.shape[0])
    for step, rows in enumerate((4, 7, 2)):
        batch = p.randn(rows, 3)
        torch._dynamo.mark_dynamic(batch, 0)
        with p.backward():
            call(batch, w).sum().backward()
        p.value(f"grad{step}", w.grad)


@scenario(tags=TAGS)
def aot_outer_backward_after_sizes_changed(p: Probe) -> None:
    """Graphs of three sizes are alive at once, and differentiated in another order than they were made."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    call = p.compile(lambda a, b: (a @ b).tanh() * a.shape[0])
    outs: list[Any] = [call(p.randn(rows, 3), w) for rows in (4, 2, 6)]
    with p.backward():
        for number in (1, 2, 0):
            outs[number].sum().backward()
            p.value(f"after{number}", w.grad)
