"""Checkpointing: forward code that runs again inside backward, in its own backward or in an unpack hook.

In: a probe. Out: how often and when regions are recomputed, and that gradients do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _block(p: Probe, name: str) -> Callable[[Tensor], Tensor]:
    """Return a small function that records each time it runs."""
    record = p.hook(name, kind="forward")

    def run(h: Tensor) -> Tensor:
        record(h)
        return (h.sin() * h).tanh()

    return run


@scenario(tags=("checkpoint",))
def checkpoint_non_reentrant(p: Probe) -> None:
    """A non-reentrant checkpoint is recomputed when the first of its saved tensors is needed."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = checkpoint(_block(p, "block"), x.exp(), use_reentrant=False)
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * 2).sum().backward()


@scenario(tags=("checkpoint", "reentrant"))
def checkpoint_reentrant(p: Probe) -> None:
    """A reentrant checkpoint is recomputed in its backward, which starts another backward inside."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = checkpoint(_block(p, "block"), x.exp(), use_reentrant=True)
    y.register_hook(p.hook("y"))
    with p.backward():
        (y * 2).sum().backward()


@scenario(tags=("checkpoint",))
def checkpoint_inside_checkpoint(p: Probe) -> None:
    """A checkpoint inside a checkpoint: recomputing the outer stops early, so the inner runs twice."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    inner = _block(p, "inner")

    def outer(h: Tensor) -> Tensor:
        return checkpoint(inner, h.cos(), use_reentrant=False) + h

    with p.backward():
        checkpoint(outer, x, use_reentrant=False).sum().backward()


@scenario(tags=("checkpoint", "reentrant"))
def checkpoint_reentrant_nested(p: Probe) -> None:
    """Reentrant checkpoints nest: a backward inside a backward inside a backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    inner = _block(p, "inner")

    def outer(h: Tensor) -> Tensor:
        return checkpoint(inner, h.cos(), use_reentrant=True) + h

    with p.backward():
        checkpoint(outer, x, use_reentrant=True).sum().backward()


@scenario(tags=("checkpoint", "reentrant"))
def checkpoints_of_both_kinds(p: Probe) -> None:
    """Reentrant and non-reentrant checkpoints in one chain and inside one another give plain gradients."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    weight = p.leaf("weight", p.randn(3, requires_grad=True))
    first, second, third = (_block(p, name) for name in ("first", "second", "third"))

    def mixed(h: Tensor) -> Tensor:
        return checkpoint(second, h * weight, use_reentrant=True) + weight

    h = checkpoint(first, x * weight, use_reentrant=True)
    h = checkpoint(mixed, h, use_reentrant=False)
    h = checkpoint(third, h, use_reentrant=True)
    with p.backward():
        (h * weight).sum().backward()


@scenario(tags=("checkpoint", "random"), fp64=False)
def checkpoint_with_dropout(p: Probe) -> None:
    """Recomputing restores the random state, so that dropout drops the same elements again."""
    layer = p.module(nn.Linear(6, 6))
    x = p.leaf("x", p.randn(4, 6, requires_grad=True))

    def run(h: Tensor) -> Tensor:
        return functional.dropout(layer(h), 0.5).relu()

    y = checkpoint(run, x, use_reentrant=False)
    z = checkpoint(run, y, use_reentrant=True)
    torch.rand(3)
    with p.backward():
        z.sum().backward()
    p.value("next", torch.rand(2))


@scenario(tags=("checkpoint", "hooks"))
def checkpoint_with_hooks_inside(p: Probe) -> None:
    """Hooks inside a region run once: on the first graph when non-reentrant, else on the recomputed one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def region(reentrant: bool) -> Callable[[Tensor], Tensor]:
        def run(h: Tensor) -> Tensor:
            inner = h.sin()
            if inner.requires_grad:
                inner.register_hook(p.hook(f"inner.{reentrant}", lambda g: g * 2))
            return inner.exp()

        return run

    y = checkpoint(region(False), x.cos(), use_reentrant=False)
    z = checkpoint(region(True), x.tanh(), use_reentrant=True)
    with p.backward():
        (y * z).sum().backward()


@scenario(tags=("checkpoint", "hooks", "accumulate"))
def checkpointed_layers_with_accumulate_hooks(p: Probe) -> None:
    """Layers that are recomputed one by one have their gradients accumulated one by one."""
    layers = p.module(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))
    for name, param in layers.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    h = p.leaf("x", p.randn(2, 3, requires_grad=True))
    for i, layer in enumerate(layers):
        record = p.hook(f"layer{i}", kind="forward")
        run = lambda t, layer=layer, record=record: (record(t), layer(t).tanh())[1]  # noqa: E731
        h = checkpoint(run, h, use_reentrant=False)
    with p.backward():
        h.pow(2).sum().backward()


@scenario(tags=("checkpoint", "reentrant"))
def checkpoint_over_segments(p: Probe) -> None:
    """`checkpoint_sequential` splits a network into segments that are recomputed from last to first."""
    model = p.module(nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        checkpoint_sequential(model, 2, x, use_reentrant=True).sum().backward()


@scenario(tags=("checkpoint", "retain-graph"))
def checkpoint_retained(p: Probe) -> None:
    """A non-reentrant checkpoint in a retained graph is recomputed in each backward."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = checkpoint(_block(p, "block"), x, use_reentrant=False)
    with p.backward():
        y.sum().backward(retain_graph=True)
        y.pow(2).sum().backward()


@scenario(tags=("checkpoint", "higher-order"))
def checkpoint_differentiated_twice(p: Probe) -> None:
    """A gradient penalty through a non-reentrant checkpoint."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = checkpoint(_block(p, "block"), x, use_reentrant=False)
    with p.backward():
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + grad.pow(2).sum()).backward()


@scenario(tags=("checkpoint", "errors"))
def checkpoint_that_recomputes_something_else(p: Probe) -> None:
    """A region that saves other tensors the second time is refused with a CheckpointError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    runs: list[int] = []

    def fickle(h: Tensor) -> Tensor:
        runs.append(1)
        return h.sin().exp() if len(runs) == 1 else h[:2].sin()

    y = checkpoint(fickle, x, use_reentrant=False)
    with p.backward():
        y.sum().backward()


@scenario(tags=("checkpoint",))
def checkpoint_selective(p: Probe) -> None:
    """A selective checkpoint keeps the results of matrix products and recomputes the rest."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))
    weight = p.leaf("weight", p.randn(3, 3, requires_grad=True))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def run(h: Tensor) -> Tensor:
        return (h.sin() @ weight).sigmoid()

    y = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    with p.backward():
        y.sum().backward()
