"""Inputs that a graph writes by itself, in one call after the other.

In: the primals of a call. Out: version counters that move as they do in eager; the inputs as they were, if
the graph raises the first time that it runs, when somebody else can still compute it. Until then, copies are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retrograd._torch.autograd import versions_of
from retrograd._torch.tensor import set_versions
from retrograd.graph.joint_graph import Partition


@dataclass(frozen=True)
class Before:
    """What a call is about to write: tensors, their versions, and what was in them if that is known."""

    tensors: Sequence[torch.Tensor]
    versions: Sequence[int | None]
    copies: Sequence[torch.Tensor] | None


class WrittenAhead:
    """The inputs that the graph of `partition` writes."""

    def __init__(self, partition: Partition) -> None:
        updates = [one for one in partition.joint.updates if one.primal in partition.written_ahead]
        self._places, self._changes = [one.primal for one in updates], [one.version for one in updates]
        self._is_proven = False

    def __bool__(self) -> bool:
        return bool(self._places)

    def before(self, primals: Sequence[torch.Tensor]) -> Before:
        """Call this before the graph runs."""
        tensors = [primals[place] for place in self._places]
        copies = None if self._is_proven else [tensor.detach().clone() for tensor in tensors]
        return Before(tensors, versions_of(tensors), copies)

    def after(self, before: Before) -> None:
        """Call this when it has run: eager's changes are counted."""
        self._is_proven = True
        self._count(before, self._changes)

    def undo(self, before: Before) -> bool:
        """Call this when it has raised. Returns whether all is as it was."""
        if before.copies is None:
            return False
        with torch.no_grad():
            for tensor, copy in zip(before.tensors, before.copies, strict=True):
                tensor.copy_(copy)
        self._count(before, [0] * len(before.tensors))
        return True

    def _count(self, before: Before, changes: Sequence[int]) -> None:
        counted = [
            (tensor, version + more)
            for tensor, version, more in zip(before.tensors, before.versions, changes, strict=True)
            if version is not None
        ]
        set_versions([tensor for tensor, _ in counted], [version for _, version in counted])
