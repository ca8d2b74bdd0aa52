"""How much memory a step holds at once: stacks of layers, checkpointed, walked twice, under a budget.

In: a probe. Out: losses and gradients. The programs are as large as the checks `memory` and `budget` need.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

WIDTH, ROWS, DEPTH = 32, 512, 6


class Layer(nn.Module):
    """A residual layer, which may look at a context besides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The input, and what the layer adds to it."""
        h = self.norm(x if context is None else x + context)
        return x + self.narrow(functional.gelu(self.wide(h)))


def _called(layer: nn.Module, *args: Any) -> Any:
    return layer(*args)


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.run: Any = partial(checkpoint, use_reentrant=False) if checkpointed else _called

    def walked(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Through all layers once."""
        for layer in self.layers:
            x = self.run(layer, x, context)
        return x


class Once(Stack):
    """One traversal."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """A loss."""
        return self.walked(x, context).square().mean()


class Twice(Stack):
    """Two traversals of the same layers: with a context and without."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """A loss of both."""
        return self.walked(x).square().mean() + self.walked(x, context).abs().mean()


def _trained(p: Probe, model: nn.Module) -> None:
    x, context = p.randn(ROWS, WIDTH), p.randn(ROWS, WIDTH)
    compiled = p.compile(p.module(model))
    loss = compiled(x, context)
    with p.backward():
        loss.backward()
    p.value("loss", loss.detach())


@scenario(tags=("memory", "checkpoint"), issue="pytorch#193193")
def two_traversals_of_checkpointed_layers(p: Probe) -> None:
    """Layers that are walked twice, each call checkpointed, hold the inside of one call at a time."""
    torch.manual_seed(p.seed)
    _trained(p, Twice(checkpointed=True))


@scenario(tags=("memory", "checkpoint"))
def one_traversal_of_checkpointed_layers(p: Probe) -> None:
    """Layers that are walked once, each call checkpointed, hold the inside of one call at a time."""
    torch.manual_seed(p.seed)
    _trained(p, Once(checkpointed=True))


@scenario(tags=("memory",), issue="pytorch#197838")
def layers_that_save_what_they_can(p: Probe) -> None:
    """Every layer saves what its backward reads; a budget for that may only lower the peak."""
    torch.manual_seed(p.seed)
    _trained(p, Once(checkpointed=False))
