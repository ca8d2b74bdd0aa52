"""What is known before a function is captured.

In: made by ``aot.create_state``. Out: read by ``aot.capture``. Nothing in it changes afterwards: it can be
captured twice, and much later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.graph.joint import PrimalKind


@dataclass(frozen=True, eq=False)
class Leaf:
    """One flat input.

    Attributes:
        name: ``args[0]``, ``layer.weight``.
        kind: what it is to the user; None for a constant, which the capture relies on.
        value: a fake tensor (or a wrapper subclass of fakes), a symbolic integer, or the constant itself.
        requires_grad, is_leaf: of the tensor that was given.
        same_as: an earlier leaf that is the very same tensor; else None.
    """

    name: str
    kind: PrimalKind | None
    value: Any
    requires_grad: bool = False
    is_leaf: bool = True
    same_as: int | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, given here for the first time."""
        return isinstance(self.value, torch.Tensor) and self.same_as is None


@dataclass(frozen=True)
class MemberView:
    """Where a leaf lies in the base of its group; sizes and strides in elements."""

    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_base: bool


@dataclass(frozen=True, eq=False)
class AliasGroup:
    """Leaves that share memory.

    Attributes:
        members: where each lies in the base.
        base: the tensor of which all are views, as a leaf of its own; None if there is none that autograd
            knows.
    """

    members: tuple[MemberView, ...]
    base: Leaf | None


@dataclass(frozen=True, eq=False)
class CaptureState:
    """A function and its inputs, ready to be captured.

    Attributes:
        name: of the function, for messages.
        call: the function of its flat inputs; returns what the user's function returns.
        leaves: the flat inputs: parameters and buffers first, then arguments.
        aliases: groups of leaves that share memory.
        thread_modes: the thread's modes under which it is called.
        fake_mode: of the fake values; its shape environment gets the guards.
        decompositions: applied while tracing.
        free: makes a fake of a real tensor that the function uses without being given it.
        in_spec: the pytree of ``(args, kwargs)``, whose leaves are the last of `leaves`; None if not known.
    """

    name: str
    call: Callable[[Sequence[Any]], Any]
    leaves: tuple[Leaf, ...]
    thread_modes: Any
    fake_mode: Any
    aliases: tuple[AliasGroup, ...] = ()
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    free: Callable[[torch.Tensor], Any] | None = None
    in_spec: Any = None

    @property
    def is_symbolic(self) -> bool:
        """Whether some sizes are symbolic."""
        kinds = (torch.SymInt, torch.SymFloat)
        numbers = [
            number
            for leaf in self.leaves
            for number in (leaf.value.shape if isinstance(leaf.value, torch.Tensor) else (leaf.value,))
        ]
        return any(isinstance(number, kinds) for number in numbers)

    @property
    def tensors(self) -> list[int]:
        """Positions of the tensors among the leaves, each given once."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.is_tensor]
