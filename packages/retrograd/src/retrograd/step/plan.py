"""What a captured step is: a graph, where its inputs come from, and what becomes of its outputs.

Frozen values, made by `capture` and run by `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["Argument", "GradOf", "Held", "NewGrad", "Number", "Result", "Source", "StepGraph"]


@dataclass(frozen=True)
class Argument:
    """A flat argument of the step, by its place."""

    place: int


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that the step reaches by itself: a parameter, a buffer, what an optimizer keeps."""

    tensor: torch.Tensor
    path: str


@dataclass(frozen=True)
class GradOf:
    """The ``.grad`` that the tensor of another input has when the step begins."""

    source: int


@dataclass(frozen=True, eq=False)
class Number:
    """An entry of an optimizer's parameter group that has changed before: a learning rate.

    Attributes:
        group, key: where it stands; `path` in words. first: what it was when it was first seen.
    """

    group: dict[str, Any]
    key: str
    path: str
    first: float


Source = Argument | Held | GradOf | Number


@dataclass(frozen=True)
class NewGrad:
    """What the ``.grad`` of the tensor of input `source` is in the end.

    Attributes:
        output: of the graph; None for no gradient, or if it is a tensor that was there before.
        input: of the graph, for such a tensor.
    """

    source: int
    output: int | None = None
    input: int | None = None


@dataclass(frozen=True)
class Result:
    """One flat value that the step returns.

    Attributes:
        output: of the graph; `input`: one that is returned as it is; else `constant`.
        is_spent: whether it requires grad, with a graph that the step has used up.
    """

    output: int | None = None
    input: int | None = None
    constant: Any = None
    is_spent: bool = False


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A captured step.

    Attributes:
        gm: an ATen graph, functional but for the writes to its inputs at the end.
        sources: by input, where it comes from.
        examples: by input, the fake tensor or symbolic number that it was traced with.
        used: numbers of the inputs that the graph takes, in their order; the others are looked at by guards
            only.
        written: numbers of the inputs that are written to.
        grads: what becomes of ``.grad``; only of tensors for which it changes.
        lacking: inputs whose ``.grad`` was None and that had none when the step began.
        results: by flat value that the step returns, and `spec`: how they are nested.
        fake_mode: of the examples. shape_env: has the relations between sizes and numbers that the trace
            relied on.
        names: that the code which ran speaks of; None: it may have read all.
        devices: from whose generators the graph draws.
    """

    gm: fx.GraphModule
    sources: Sequence[Source]
    examples: Sequence[Any]
    used: frozenset[int]
    written: frozenset[int]
    grads: Sequence[NewGrad]
    lacking: Sequence[int]
    results: Sequence[Result]
    spec: Any
    fake_mode: Any
    shape_env: Any
    names: frozenset[str] | None
    devices: tuple[torch.device, ...]
