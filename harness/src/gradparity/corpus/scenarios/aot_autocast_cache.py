"""Autocast keeps the casts of leaves until its outermost block ends; what of that compiled code shows.

In: a probe, whose `training_step` and `compile` are the identity for eager. Out: losses and gradients. Eager
casts a leaf once and adds up its gradient in the low precision; what is no leaf is cast anew for each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "autocast")


def _autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def _finished(value: Tensor) -> Tensor:
    return (value.float() * 0.3).sin().sum()


def _twice(x: Tensor, w: Tensor) -> Tensor:
    return _finished(functional.linear(functional.linear(x, w).tanh(), w))


def _inner_off(x: Tensor, w: Tensor) -> Tensor:
    low = functional.linear(x, w)
    with _autocast(enabled=False):
        full = functional.linear(x, w)
    return _finished(low.float() * full + functional.linear(x * 2, w))


def _without_grad_first(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        target = functional.linear(x, w).float()
    return _finished(functional.linear(x, w).float() - target * 0.5) + (w * w).sum()


def _through_views(x: Tensor, w: Tensor) -> Tensor:
    return _finished(functional.linear(x, w.t()) + functional.linear(x * 2, w.t()) + functional.linear(x, w))


def _changed_between(x: Tensor, w: Tensor) -> Tensor:
    first = functional.linear(x, w)
    with torch.no_grad():
        w.mul_(0.5)
    return _finished(first + functional.linear(x * 2, w))


def _in_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    inner = checkpoint(lambda a: functional.linear(functional.linear(a, w).tanh(), w), x, use_reentrant=False)
    return _finished(inner + functional.linear(x * 2, w))


def _of_an_intermediate(x: Tensor, w: Tensor) -> Tensor:
    h = (w * 2).float()
    return _finished(functional.linear(x, h) * functional.linear(x + 1, h))


#: what reads the weight under autocast.
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "used_twice": _twice,
    "with_an_inner_block_switched_off": _inner_off,
    "first_used_without_grad": _without_grad_first,
    "used_through_views": _through_views,
    "changed_between_two_uses": _changed_between,
    "used_in_a_checkpoint": _in_a_checkpoint,
    "of_which_an_intermediate_is_used": _of_an_intermediate,
}


def _inside(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, w: Tensor) -> Tensor:
        with _autocast():
            return use(x, w)

    return run


def _register(use: str, where: str) -> None:
    def body(p: Probe) -> None:
        w, x = p.leaf("w", p.randn(8, 8, requires_grad=True)), p.randn(5, 8)
        call = p.compile(_inside(USES[use]) if where == "inside" else USES[use])

        def step(backward: Any, x: Tensor, w: Tensor) -> Tensor:
            with _autocast(enabled=where != "inside", cache_enabled=where != "without_cache"):
                loss = call(x, w)
                if where == "around_the_backward_too":
                    backward(loss)
            if where != "around_the_backward_too":
                backward(loss)
            return loss.detach()

        run = p.training_step(step)
        for number in range(2):
            p.value(f"loss{number}", run(x, w).clone())

    body.__name__ = f"autocast_{where}_of_a_weight_{use}"
    body.__doc__ = (
        f"A weight {use.replace('_', ' ')}, autocast {where.replace('_', ' ')}: its casts are eager's."
    )
    scenario(tags=TAGS, fp64=False)(body)


for _use in USES:
    for _where in ("around", "inside", "without_cache", "around_the_backward_too"):
        _register(_use, _where)


@scenario(tags=TAGS, fp64=False)
def autocast_of_an_input_that_is_no_leaf(p: Probe) -> None:
    """An input with history is cast anew for each use, so that its gradients are added in float32."""
    w, x = p.leaf("w", p.randn(8, 8, requires_grad=True)), p.leaf("x", p.randn(5, 8, requires_grad=True))
    call = p.compile(
        lambda h, w: _finished(functional.linear(h, w).sin() * functional.linear(h.float(), w).cos())
    )
    for _ in range(2):
        h = x.sin()
        with _autocast():
            out = call(h, w)
        with p.backward():
            out.backward()


@scenario(tags=(*TAGS, "higher-order"), fp64=False)
def autocast_of_an_activation_differentiated_twice(p: Probe) -> None:
    """An input with history is cast for each of several results. Small whole numbers: no sum is rounded."""
    x, w = (
        p.leaf(name, ((torch.arange(9) * step) % 3 - 1).reshape(3, 3).to(p.dtype).requires_grad_())
        for name, step in (("x", 1), ("w", 2))
    )
    call = p.compile(lambda h, w: (h @ w, (h @ w) * 2, h * w))
    for _ in range(2):
        with _autocast():
            outputs = call(x * 1, w)
        with p.backward():
            grads = torch.autograd.grad(
                outputs, [x, w], [torch.ones_like(out) for out in outputs], create_graph=True
            )
            (grads[0].square().sum() + grads[1].square().sum()).backward()


@scenario(tags=(*TAGS, "modules"), fp64=False)
def autocast_of_tied_weights(p: Probe) -> None:
    """Tied and repeated layers of a model: each parameter is cast once in a step."""
    embedding, layer, head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7, bias=False)
    head.weight = embedding.weight
    model = p.module(nn.Sequential(embedding, layer, nn.ReLU(), layer, head))
    call, tokens = p.compile(model), p.randint(7, 3, 4)
    for number in range(2):
        with _autocast():
            loss = functional.cross_entropy(call(tokens).float().flatten(0, 1), tokens.flatten())
        p.value(f"loss{number}", loss.detach())
        with p.backward():
            loss.backward()


@scenario(tags=TAGS)
def aot_leaf_that_is_a_view_and_a_backward_inside(p: Probe) -> None:
    """A leaf that is a view of plain memory is cast for each use, also in a backward in the block."""
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "twice": lambda x, w: functional.linear(functional.linear(x, w), w),
        "once": functional.linear,
        "in a checkpoint": lambda x, w: checkpoint(
            lambda a: functional.linear(functional.linear(a, w), w), x, use_reentrant=False
        ),
    }
    for name, way in ways.items():
        # Small whole numbers: however casts are shared, the sums are the same.
        w = p.leaf(name, torch.arange(8.0, dtype=p.dtype).reshape(2, 4)[:, ::2].requires_grad_())
        x = torch.arange(4.0, dtype=p.dtype).reshape(2, 2)
        with _autocast():
            outputs = p.compile(lambda a, b: (way(a, b), torch.einsum("ii->i", b)))(x, w)
            with p.backward():
                torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])


@scenario(tags=TAGS, fp64=False)
def autocast_inside_the_kernels_of_an_operator(p: Probe) -> None:
    """Kernels that call other operators have autocast cast what those are given, and give float32."""
    for name, fn in {
        "bilinear": lambda x, w: functional.bilinear(x, x.flip(0), w),
        "inverse": lambda x, w: torch.linalg.pinv(x.detach()).float().t() * x,
        "another": lambda x, w: (x @ w[0]).float(),
    }.items():
        x, w = p.leaf(f"x {name}", p.randn(4, 5, requires_grad=True)), p.randn(3, 5, 5)
        with _autocast():
            out = p.compile(fn)(x, w)
        p.value(name, out)
        with p.backward():
            out.float().square().sum().backward()
