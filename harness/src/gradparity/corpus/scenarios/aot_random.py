"""Random numbers in functions compiled ahead: eager's own, the same in forward and backward.

In: a probe, whose `compile` is the identity for eager. Out: values, gradients, and the state of the
generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "random")


@scenario(tags=TAGS, fp64=False)
def aot_two_dropouts(p: Probe) -> None:
    """Two dropouts in one function draw eager's two masks, and what is drawn next is eager's too."""
    x = p.leaf("x", p.randn(16, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        return functional.dropout(functional.dropout(a, 0.3).sin(), 0.5).exp()

    out = p.compile(run)(x)
    p.value("out", out.detach())
    p.value("next", torch.rand(2))
    with p.backward():
        out.sum().backward()
    p.value("after backward", torch.rand(2))


@scenario(tags=TAGS, fp64=False)
def aot_noise_like_the_input(p: Probe) -> None:
    """`rand_like`, `randn`, `bernoulli` and `randint` inside, three calls in a row, each with new numbers."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(a) + torch.randn(4, device=a.device) * torch.bernoulli(a.sigmoid().detach())
        return a * noise, torch.randint(10, (3,), device=a.device)

    call = p.compile(run)
    for step in range(3):
        out, numbers = call(x)
        p.value(f"numbers{step}", numbers)
        with p.backward():
            out.sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=TAGS, fp64=False)
def aot_same_seed_same_mask(p: Probe) -> None:
    """The same seed before two calls gives the same mask twice."""
    x = p.leaf("x", p.rand(8, requires_grad=True))
    call = p.compile(lambda a: functional.dropout(a + 1, 0.5))
    for step in range(2):
        torch.manual_seed(7)
        out = call(x)
        p.value(f"out{step}", out.detach())
        with p.backward():
            out.sum().backward()


@scenario(tags=TAGS, fp64=False)
def aot_generator_as_argument(p: Probe) -> None:
    """Numbers from a generator of one's own are drawn from it, and the global one stays where it was."""
    x, generator = p.leaf("x", p.randn(4, requires_grad=True)), torch.Generator(p.device).manual_seed(3)

    def run(a: Tensor) -> Tensor:
        return a * torch.rand(4, generator=generator, device=a.device)

    call = p.compile(run)
    for step in range(2):
        out = call(x)
        p.value(f"out{step}", out.detach())
        with p.backward():
            out.sum().backward()
    p.value("global", torch.rand(2))


@scenario(tags=(*TAGS, "checkpoint"), fp64=False)
def aot_dropout_in_a_checkpoint(p: Probe) -> None:
    """A checkpoint inside the function draws its mask again in the backward: the same one."""
    layer = p.module(nn.Linear(6, 6))
    x = p.leaf("x", p.randn(2, 6, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        inner = checkpoint(lambda h: functional.dropout(layer(h).tanh(), 0.5), a, use_reentrant=False)
        return inner.sin()

    out = p.compile(run)(x)
    p.value("out", out.detach())
    with p.backward():
        out.sum().backward()
    p.value("next", torch.rand(2))


@scenario(tags=(*TAGS, "checkpoint", "reentrant"), fp64=False)
def aot_dropout_in_a_reentrant_checkpoint(p: Probe) -> None:
    """So does a reentrant one."""
    layer = p.module(nn.Linear(6, 6))
    x = p.leaf("x", p.randn(2, 6, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        return checkpoint(lambda h: functional.dropout(layer(h).tanh(), 0.5), a, use_reentrant=True).sin()

    out = p.compile(run)(x)
    p.value("out", out.detach())
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "checkpoint"), fp64=False)
def aot_compiled_dropout_under_a_checkpoint(p: Probe) -> None:
    """A checkpoint around the compiled function runs it again in the backward, with the same mask."""
    x = p.leaf("x", p.randn(8, requires_grad=True))
    call = p.compile(lambda a: functional.dropout(a.sin(), 0.5) * a)
    out = checkpoint(call, x, use_reentrant=False)
    with p.backward():
        out.sum().backward()
    p.value("out", out.detach())


@scenario(tags=(*TAGS, "retain-graph"), fp64=False)
def aot_dropout_differentiated_twice(p: Probe) -> None:
    """A kept graph uses the mask of its forward in both of its backwards, and in the second derivative."""
    x = p.leaf("x", p.rand(8, requires_grad=True))
    out = p.compile(lambda a: functional.dropout(a.square(), 0.5))(x)
    with p.backward():
        p.value("first", torch.autograd.grad(out.sum(), x, retain_graph=True))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        p.value("second", torch.autograd.grad(slope.sum(), x))


@scenario(tags=TAGS, fp64=False)
def aot_dropout_switched_off_and_on(p: Probe) -> None:
    """A module in evaluation, training and evaluation again: dropout draws only when training."""
    model = p.module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
    run, x = p.compile(model), p.randn(3, 4)
    for step, training in enumerate((False, True, False, True)):
        model.train(training)
        out = run(x)
        p.value(f"out{step}", out.detach())
        with p.backward():
            out.sum().backward()
    p.value("next", torch.rand(2))


@scenario(tags=TAGS, fp64=False)
def aot_attention_with_dropout(p: Probe) -> None:
    """Attention with dropout, whose mask the backward needs."""
    q, k, v = (p.leaf(name, p.randn(1, 2, 4, 8, requires_grad=True)) for name in "qkv")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)

    out = p.compile(run)(q, k, v)
    p.value("out", out.detach())
    with p.backward():
        out.square().sum().backward()
