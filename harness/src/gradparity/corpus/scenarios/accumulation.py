"""Accumulation into `.grad`: what is added in place, what is stolen, what is copied, and in which layout.

In: a probe. Out: `.grad` values, strides and dtypes, and booleans about identity and shared memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _shares(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors start at the same address."""
    assert a is not None
    assert b is not None
    return bool(a.data_ptr() == b.data_ptr())


@scenario(tags=("accumulation", "identity"))
def second_backward_adds_in_place(p: Probe) -> None:
    """The second backward adds to the very tensor that the first one left, so older references see it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        x.sin().sum().backward()
        first = x.grad
        x.cos().sum().backward()
    p.event("same_object", x.grad is first)
    p.value("first", first)


@scenario(tags=("accumulation", "identity"))
def grad_that_was_set_by_hand(p: Probe) -> None:
    """A `.grad` set by hand is added to in place and keeps its strides, whatever they are."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    mine = p.randn(4, 3).t()
    x.grad = mine
    with p.backward():
        x.sin().sum().backward()
    p.event("same_object", x.grad is mine)


@scenario(tags=("accumulation",))
def zero_grad_both_ways(p: Probe) -> None:
    """`zero_grad` with and without `set_to_none` over four steps: a new tensor or the old one."""
    layer = p.module(nn.Linear(3, 2))
    for step in range(4):
        before = layer.weight.grad
        layer.zero_grad(set_to_none=step % 2 == 0)
        with p.backward():
            layer(p.randn(2, 3)).sum().backward()
        p.event("same_object", layer.weight.grad is before)
        p.value(f"grad{step}", layer.weight.grad)


@scenario(tags=("accumulation", "shared"))
def leaf_used_twice(p: Probe) -> None:
    """A leaf with two uses is accumulated once, with both gradients."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x", kind="post_acc"))
    with p.backward():
        (x * x.detach() + x.exp()).sum().backward()


@scenario(tags=("accumulation", "shared"))
def tied_embedding_and_output(p: Probe) -> None:
    """A weight tied between an embedding and the output layer gets the sum of both gradients."""
    embedding = nn.Embedding(6, 4)
    head = nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    model = p.module(nn.Sequential(embedding, nn.Tanh(), head))
    embedding.weight.register_hook(p.hook("weight"))
    with p.backward():
        model(p.randint(6, 2, 3)).log_softmax(-1)[..., 0].sum().backward()


@scenario(tags=("accumulation", "identity", "aliasing"))
def root_gradient_is_copied(p: Probe) -> None:
    """The gradient that the user passes straight to a leaf is copied into `.grad`, never taken over."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    mine = p.randn(4)
    with p.backward():
        x.backward(mine)
    p.event("shares_memory", _shares(x.grad, mine))
    mine.zero_()


@scenario(tags=("accumulation", "identity", "aliasing"))
def root_gradient_stolen_through_a_view(p: Probe) -> None:
    """Behind a view node the gradient is a fresh view, which is stolen: `.grad` shares the user's memory."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    mine = p.randn(4)
    with p.backward():
        x.view(2, 2).backward(mine.view(2, 2))
    p.event("shares_memory", _shares(x.grad, mine))
    mine.zero_()


@scenario(tags=("accumulation", "identity", "aliasing"))
def two_leaves_one_gradient(p: Probe) -> None:
    """One gradient that reaches two leaves becomes two tensors: changing one `.grad` leaves the other."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    y = p.leaf("y", p.randn(4, requires_grad=True))
    with p.backward():
        ((x + y) * p.randn(4)).sum().backward()
    p.event("shares_memory", _shares(x.grad, y.grad))
    assert x.grad is not None
    x.grad.zero_()


@scenario(tags=("accumulation", "layout"))
def expanded_gradient_is_laid_out(p: Probe) -> None:
    """The gradient of a sum is an expanded scalar; as `.grad` it is a full tensor that can be written to."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    with p.backward():
        x.sum().backward()
    assert x.grad is not None
    x.grad[0, 0] = 5


@scenario(tags=("accumulation", "layout"))
def channels_last_convolution(p: Probe) -> None:
    """Weight and input in channels-last layout get `.grad` in that layout."""
    conv: Any = p.module(nn.Conv2d(3, 4, 3, padding=1))
    conv.to(memory_format=torch.channels_last)
    image = p.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    x = p.leaf("x", image.requires_grad_())
    with p.backward():
        conv(x).pow(2).mean().backward()


@scenario(tags=("accumulation", "layout"))
def gradient_of_another_layout(p: Probe) -> None:
    """A contiguous leaf whose gradient arrives transposed gets a contiguous `.grad`."""
    x = p.leaf("x", p.randn(3, 4, requires_grad=True))
    weight = p.randn(4, 3).t().contiguous().t()
    with p.backward():
        (x.t() * weight).sum().backward()


@scenario(tags=("accumulation", "sparse"))
def sparse_embedding(p: Probe) -> None:
    """A sparse embedding gives a sparse `.grad`, and adds another sparse one to it."""
    embedding = p.module(nn.Embedding(6, 3, sparse=True))
    embedding.weight.register_hook(p.hook("weight"))
    with p.backward():
        embedding(p.tensor([1, 4, 1])).sum().backward()
        embedding(p.tensor([0, 4])).pow(2).sum().backward()


@scenario(tags=("accumulation", "sparse"))
def sparse_gradient_meets_dense(p: Probe) -> None:
    """A sparse and a dense gradient of one weight add up to a dense one, in the buffer and in `.grad`."""
    embedding = p.module(nn.Embedding(4, 2, sparse=True))
    index = p.tensor([1, 3])
    with p.backward():
        (embedding(index).sum() + embedding.weight.sin().sum()).backward()
        embedding(index).sum().backward()


@scenario(tags=("accumulation", "dtype"), fp64=False)
def complex_leaf(p: Probe) -> None:
    """Complex leaves get conjugate gradients; a real leaf below complex ones gets a real one."""
    z = p.leaf("z", torch.complex(p.randn(3), p.randn(3)).requires_grad_())
    r = p.leaf("r", p.randn(3, requires_grad=True))
    out = (z * r).exp() * z.conj()
    out.register_hook(p.hook("out"))
    with p.backward():
        out.abs().sum().backward()


@scenario(tags=("accumulation", "dtype"), fp64=False)
def low_precision_leaves(p: Probe) -> None:
    """Leaves in half and bfloat16 get `.grad` in their own dtype, also below float32 arithmetic."""
    half = p.leaf("half", p.randn(4).half().requires_grad_())
    brain = p.leaf("brain", p.randn(4).bfloat16().requires_grad_())
    with p.backward():
        (half.float() * brain.float()).sin().sum().backward()
        (half * brain.half() * 3).sum().backward()


@scenario(tags=("accumulation", "dtype"), fp64=False)
def mixed_dtypes(p: Probe) -> None:
    """Where a float32 leaf meets float64, its gradient is computed in float64 and comes back as float32."""
    x = p.leaf("x", p.randn(4).float().requires_grad_())
    y = p.leaf("y", p.randn(4).double().requires_grad_())
    x.register_hook(p.hook("x"))
    with p.backward():
        (x * y).exp().sum().backward()


@scenario(tags=("accumulation", "shapes"))
def empty_and_scalar_leaves(p: Probe) -> None:
    """Leaves without elements and without dimensions get `.grad` of the same shape."""
    empty = p.leaf("empty", p.randn(0, 3, requires_grad=True))
    scalar = p.leaf("scalar", p.tensor(1.5, requires_grad=True))
    for name, leaf in (("empty", empty), ("scalar", scalar)):
        leaf.register_hook(p.hook(name))
    with p.backward():
        (empty.sin().sum() + scalar * scalar + (empty * scalar).sum()).backward()


@scenario(tags=("accumulation", "dtype"))
def grad_of_another_dtype_by_choice(p: Probe) -> None:
    """A bfloat16 leaf that asks for float32 gradients (`grad_dtype`) accumulates in float32."""
    low, high = (torch.bfloat16, torch.float32) if p.dtype is torch.float32 else (p.dtype, p.dtype)
    x = p.leaf("x", p.randn(4).to(low).requires_grad_())
    if hasattr(x, "grad_dtype"):
        x.grad_dtype = high
    scale = p.randn(4).to(high)
    with p.backward():
        (x.to(high) * scale).sum().backward()
        (x.to(high) * scale * 0.001).sum().backward()


@scenario(tags=("accumulation", "errors"))
def grad_that_cannot_be_added_to(p: Probe) -> None:
    """An expanded `.grad` set by hand cannot be added to in place: a RuntimeError."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    x.grad = p.tensor([1.0]).expand(4)
    with p.backward():
        x.sin().sum().backward()


@scenario(tags=("accumulation", "higher-order", "identity"))
def create_graph_accumulates_anew(p: Probe) -> None:
    """With `create_graph` the sum goes into a new tensor with a history; the old `.grad` is left alone."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with p.backward():
        x.pow(3).sum().backward()
        first = x.grad
        x.pow(2).sum().backward(create_graph=True)
    p.event("same_object", x.grad is first)
    p.event("requires_grad", x.grad is not None and x.grad.requires_grad)
    p.value("first", first)
    x.grad = x.grad.detach() if x.grad is not None else None
