"""Checkpoints inside functions compiled ahead: of both kinds, nested, by policy, over the parts of a network.

In: a probe, whose `compile` is the identity for eager. Out: gradients, and the order in which they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "checkpoint")
#: requests of a loss that is made of two leaves.
REQUESTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "all": lambda loss, x, w: loss.backward(),
    "differentiable": lambda loss, x, w: loss.backward(create_graph=True),
    "into an argument": lambda loss, x, w: loss.backward(inputs=[x]),
    "into what is read": lambda loss, x, w: loss.backward(inputs=[w]),
    "gradient of an argument": lambda loss, x, w: torch.autograd.grad(loss, x),
}


@scenario(tags=(*TAGS, "hooks", "order"))
def aot_checkpointed_layers(p: Probe) -> None:
    """Every layer in a checkpoint of its own: parameters are accumulated from the last layer to the first."""
    layers = p.module(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))
    watch_parameters(p, layers)

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=False)
        return x

    with p.backward():
        p.compile(run)(p.randn(2, 3, requires_grad=True)).sum().backward()


@scenario(tags=(*TAGS, "reentrant", "hooks", "order"))
def aot_reentrant_checkpoints_in_a_row(p: Probe) -> None:
    """The same with reentrant checkpoints, whose backwards run inside the backward."""
    layers = p.module(nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
    watch_parameters(p, layers)

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(lambda h, layer=layer: layer(h).tanh(), x, use_reentrant=True)
        return x

    with p.backward():
        p.compile(run)(p.randn(2, 3, requires_grad=True)).sum().backward()


@scenario(tags=(*TAGS, "reentrant"))
def aot_reentrant_checkpoint_and_what_is_asked_for(p: Probe) -> None:
    """It refuses some requests, and others do not reach it; its gradients have no history."""
    programs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "read inside": lambda x, w: checkpoint(lambda t: (t * w).sin(), x, use_reentrant=True),
        "and outside": lambda x, w: checkpoint(lambda t: (t * w).sin(), x, use_reentrant=True) * w,
        "only outside": lambda x, w: checkpoint(torch.sin, x, use_reentrant=True) + w.exp(),
        "given": lambda x, w: checkpoint(lambda t, u: t.cos() * u, x * 2, w, use_reentrant=True),
    }
    for name, program in programs.items():
        run = p.compile(program)
        for kind, request in REQUESTS.items():
            x, w = (p.leaf(f"{leaf} {name} {kind}", p.randn(3, requires_grad=True)) for leaf in "xw")
            loss = run(x, w).square().sum()
            with p.backward():
                try:
                    request(loss, x, w)
                except RuntimeError as error:
                    p.event(f"{name} {kind}", str(error).split(".", maxsplit=1)[0])
            history = [leaf.grad is not None and leaf.grad.requires_grad for leaf in (x, w)]
            p.event(f"{name} {kind}", history)


@scenario(tags=TAGS)
def aot_checkpoint_within_a_checkpoint(p: Probe) -> None:
    """A checkpoint inside a checkpoint gives the gradients of none."""
    x, w = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xw")

    def inner(h: Tensor) -> Tensor:
        return (h * w).sin()

    def outer(h: Tensor) -> Tensor:
        return checkpoint(inner, h.exp(), use_reentrant=False) * h

    with p.backward():
        p.compile(lambda a: checkpoint(outer, a, use_reentrant=False).sum())(x).backward()


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products are kept, all else is computed again."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@scenario(tags=TAGS)
def aot_checkpoint_by_policy(p: Probe) -> None:
    """A selective checkpoint that keeps matrix products, over two steps."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)))
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    run = p.compile(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts).sin())
    for step in range(2):
        with p.backward():
            run(p.randn(2, 3)).sum().backward()
        p.value(f"grad{step}", model[0].weight.grad)


@scenario(tags=(*TAGS, "effects"))
def aot_checkpoint_whose_contexts_are_made_in_the_call(p: Probe) -> None:
    """Contexts that a function made in the call gives are entered in a forward, and when it is repeated."""
    w = p.leaf("w", p.randn(3, 3, requires_grad=True))
    entered: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    def run(x: Tensor) -> Tensor:
        def contexts() -> tuple[Any, Any]:
            return noted("forward"), noted("repeated")

        return checkpoint(lambda h: (h @ w).sin().exp(), x, use_reentrant=False, context_fn=contexts)

    compiled = p.compile(run)
    for _ in range(3):
        with p.backward():
            compiled(p.randn(2, 3)).sum().backward()
        p.value("entered", tuple(entered))


@scenario(tags=TAGS)
def aot_checkpoint_by_a_policy_made_in_the_call(p: Probe) -> None:
    """The policy of a selective checkpoint is chosen by an argument of the call."""
    w = p.leaf("w", p.randn(3, 3, requires_grad=True))

    def run(x: Tensor, keeps: bool) -> Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(_keep_products if keeps else [])

        return checkpoint(lambda h: (h @ w).sin().exp() @ w, x, use_reentrant=False, context_fn=contexts)

    compiled = p.compile(run)
    for step, keeps in enumerate((True, False, True)):
        x = p.leaf(f"x{step}", p.randn(2, 3, requires_grad=True))
        with p.backward():
            compiled(x, keeps).sum().backward()


@scenario(tags=TAGS)
def aot_checkpoint_over_parts_of_a_network(p: Probe) -> None:
    """`checkpoint_sequential` inside a compiled function."""
    model = p.module(nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        p.compile(lambda a: checkpoint_sequential(model, 2, a, use_reentrant=False))(x).sum().backward()


@scenario(tags=(*TAGS, "higher-order"))
def aot_checkpoint_differentiated_twice(p: Probe) -> None:
    """The second derivative through a checkpoint inside a compiled function."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: checkpoint(lambda h: h.sin() * h, a, use_reentrant=False).sum())(x)
    with p.backward():
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.square().sum().backward()


@scenario(tags=(*TAGS, "retain-graph"))
def aot_checkpoint_in_a_kept_graph(p: Probe) -> None:
    """A kept graph with a checkpoint, used three times."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    out = p.compile(lambda a: checkpoint(lambda h: (h.sin() * h).exp(), a, use_reentrant=False))(x)
    with p.backward():
        for step in range(3):
            p.value(f"grad{step}", torch.autograd.grad(out.sum(), x, retain_graph=True))


@scenario(tags=(*TAGS, "in-place"))
def aot_checkpoint_whose_result_the_caller_changes(p: Probe) -> None:
    """What a checkpoint computes again is not kept, so that the caller may change it."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = checkpoint(lambda h: (h @ h).tanh(), a, use_reentrant=False)
        part = checkpoint(lambda h: h.relu(), whole + 1, use_reentrant=False)
        return whole, part, checkpoint(lambda h: h.exp().view(-1), a, use_reentrant=False)

    outputs = p.compile(run)(x)
    for output in outputs:
        output.mul_(2)
    with p.backward():
        sum(output.sum() for output in outputs).backward()


@scenario(tags=(*TAGS, "in-place", "errors"))
def aot_checkpoint_whose_result_is_kept_outside(p: Probe) -> None:
    """What is computed from a checkpoint's result keeps it, so that the caller may not change it."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        inner = checkpoint(lambda h: (h * h).tanh(), a, use_reentrant=False)
        return inner, inner.sin()

    inner, outer = p.compile(run)(x)
    inner.mul_(2)
    with p.backward():
        outer.sum().backward()


#: draw random numbers, which shape the gradient.
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropped": lambda x: nn.functional.dropout(x.sin(), 0.4),
    "scaled": lambda x: x.sin() * torch.rand_like(x),
    "shuffled": lambda x: x[torch.randperm(len(x), device=x.device)].sin() * x,
}
#: uses of a result of one leaf.
USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "penalty": lambda out, x: (
        torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum().backward()
    ),
    "twice": lambda out, x: [out.sum().backward(retain_graph=keep) for keep in (True, False)],
    "penalty_and_loss": lambda out, x: (out.sum().backward(create_graph=True), out.exp().sum().backward()),
    "wide_cotangent": lambda out, x: out.backward(
        torch.ones(len(x), 2 * x.shape[1], device=x.device)[:, ::2]
    ),
}


def _register_drawn(drawn: str, use: str) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(6, 4, requires_grad=True))

        def run(a: Tensor) -> Tensor:
            hidden = checkpoint(DRAWN[drawn], a, use_reentrant=False)
            assert isinstance(hidden, Tensor)
            return checkpoint(DRAWN[drawn], hidden.exp(), use_reentrant=False)

        call = p.compile(run)
        for step in range(2):
            out = call(x)
            p.value(f"out{step}", out.detach())
            with p.backward():
                USES[use](out, x)
            p.value(f"next{step}", torch.rand(2))

    body.__name__ = f"aot_checkpoint_drawn_{drawn}_{use}"
    body.__doc__ = f"A checkpoint that is computed again draws the same numbers: {drawn}, {use}."
    scenario(tags=(*TAGS, "random"), fp64=False)(body)


for _drawn in DRAWN:
    for _use in USES:
        _register_drawn(_drawn, _use)
