"""Small programs whose graphs, schedules and generated code are kept as text.

In: nothing. Out: `LIVE`, programs that run backwards in a context of the live path; `AHEAD`, functions or
modules with arguments, for the stages of `retrograd.aot`. Each is named for what only it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

Ahead = tuple[Callable[..., Any], tuple[Any, ...], bool]


class Cube(torch.autograd.Function):
    """A Function that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def leaf(*sizes: int) -> torch.Tensor:
    """Ones that require grad."""
    return torch.ones(sizes, requires_grad=True)


def layers(count: int) -> nn.Sequential:
    """Equal layers, one after the other."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


def seen(*_: Any) -> None:
    """A hook that changes nothing."""


# live: each returns the losses whose backwards run one after the other


def perceptron() -> list[torch.Tensor]:
    """Two layers and nothing else."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return [model(torch.ones(2, 3)).sum()]


def hooked_branches() -> list[torch.Tensor]:
    """Two branches with a hook each: the engine walks them in another order than eager."""
    x = leaf(2)
    left, right = x * 2, x * 3
    left.register_hook(seen)
    right.register_hook(seen)
    return [(right.sin() + left.exp()).sum()]


def hooks_of_leaves() -> list[torch.Tensor]:
    """Hooks before and behind the accumulation, and one of a node."""
    model = nn.Linear(2, 2)
    model.weight.register_hook(seen)
    model.weight.register_post_accumulate_grad_hook(seen)
    y = model(torch.ones(1, 2))
    y.grad_fn.register_prehook(seen)
    return [y.sum()]


def module_hooks() -> list[torch.Tensor]:
    """A full backward hook in the middle of a model."""
    model = layers(2)
    model[1].register_full_backward_hook(seen)
    return [model(torch.ones(2, 4)).sum()]


def in_place_and_views() -> list[torch.Tensor]:
    """A part of a tensor is overwritten."""
    y = leaf(3, 2) * 2
    y[1:].mul_(3)
    return [y.t().sum()]


def function_between() -> list[torch.Tensor]:
    """A Python Function between two operations."""
    return [Cube.apply(leaf(3).sin()).exp().sum()]


def checkpointed() -> list[torch.Tensor]:
    """A checkpoint, which unpack hooks compute once more."""
    return [checkpoint(lambda x: x.sin().exp(), leaf(3), use_reentrant=False).sum()]


def repeated_layers() -> list[torch.Tensor]:
    """Six equal layers."""
    return [layers(6)(torch.ones(2, 4)).sum()]


def another_size() -> list[torch.Tensor]:
    """A second backward of another size."""
    weight = leaf(3)
    return [(torch.ones(size, 3) * weight).sum() for size in (2, 5)]


def kept_once() -> list[torch.Tensor]:
    """Values that saved-tensor hooks pack and unpack."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return [leaf(3).exp().sin().sum()]


LIVE: tuple[Callable[[], list[torch.Tensor]], ...] = (
    perceptron,
    hooked_branches,
    hooks_of_leaves,
    module_hooks,
    in_place_and_views,
    function_between,
    checkpointed,
    repeated_layers,
    another_size,
    kept_once,
)

# ahead of time


def views_and_writes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Writes into an argument, and returns views."""
    y.mul_(2)
    return x.t(), (x * y)[0]


def two_regions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two results that can be differentiated one after the other."""
    return (x.sin() * 2).sum(), (y.cos() * 3).sum()


def shared_work(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two results that share a value."""
    common = x.exp()
    return common.sin(), common.cos()


def with_checkpoint(x: torch.Tensor) -> torch.Tensor:
    """A checkpoint around two of three operations."""
    return checkpoint(lambda x: x.sin().exp(), x.cos(), use_reentrant=False).sum()


def under_autocast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ weight).float().sum()


def with_dropout(x: torch.Tensor) -> torch.Tensor:
    """Random numbers that the backward must use again."""
    return nn.functional.dropout(x.sin(), 0.5).sum()


AHEAD: dict[str, Ahead] = {
    "module": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.ones(2, 3),), False),
    "views_and_writes": (views_and_writes, (leaf(2, 3), torch.ones(2, 3)), False),
    "two_regions": (two_regions, (leaf(3), leaf(3)), False),
    "shared_work": (shared_work, (leaf(3),), False),
    "checkpoint": (with_checkpoint, (leaf(3),), False),
    "autocast": (under_autocast, (leaf(2, 3), leaf(3, 2)), False),
    "subclass": (lambda x: (x * 2).sum(), (TwoTensor(leaf(2), leaf(2)).requires_grad_(),), False),
    "dropout": (with_dropout, (leaf(4),), False),
    "repeated_layers": (layers(4), (torch.ones(2, 4),), False),
    "dynamic_sizes": (lambda x, w: (x @ w).tanh().sum(), (leaf(5, 3), leaf(3, 2)), True),
}
