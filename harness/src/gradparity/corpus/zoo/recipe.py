"""What a model of the zoo is, and how it is trained.

In: a recipe, which makes a model, batches and a loss. Out: a body that trains it for three steps as people
do: ``zero_grad``, forward, loss, backward, clipping, AdamW.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gradparity.probe import Body, Probe

STEPS = 3
Loss = Callable[[Callable[..., Any], Any], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What is trained.

    Attributes:
        model: its parameters are optimized.
        batches: one a step, used in turn.
        loss: of the model, as the subject compiled it, and a batch.
    """

    model: nn.Module
    batches: list[Any]
    loss: Loss


@dataclass(frozen=True)
class Recipe:
    """A row of the zoo.

    Attributes:
        package: the module that must be installed.
        body: what the program does.
        doc: one line for people.
        fp64: whether a run in float64 makes sense.
    """

    package: str
    body: Body
    doc: str = ""
    fp64: bool = True


def trained(package: str, build: Callable[[Probe], Trained], doc: str = "", fp64: bool = True) -> Recipe:
    """The recipe that trains what `build` makes."""
    return Recipe(package, partial(_train, build), doc, fp64)


def _train(build: Callable[[Probe], Trained], p: Probe) -> None:
    torch.manual_seed(p.seed)
    made = build(p)
    model = p.module(made.model).train()
    compiled = p.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(backward: Callable[[torch.Tensor], None], batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = made.loss(compiled, batch)
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run = p.training_step(step)
    for number in range(STEPS):
        p.value(f"loss {number}", run(made.batches[number % len(made.batches)]).clone())


def is_installed(package: str) -> bool:
    """Whether the package can be imported; its name is that of the module."""
    return importlib.util.find_spec(package) is not None
