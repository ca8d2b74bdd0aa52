"""Handles inputs that a graph mutates itself.

In: the primals of a call. Out: version counters that move as in eager. Until the graph has run once without
an error, we copy these inputs before each call. If the graph raises, we restore them, and eager can still
compute the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from retrograd.engine import versions_of
from retrograd.graph.joint_graph import Partition
from retrograd.runtime.tensor import set_versions

#: what a call is about to write: each tensor, its version, and a copy until the graph has run once.
Before = Sequence[tuple[torch.Tensor, int | None, torch.Tensor | None]]


class WrittenAhead:
    """The inputs that the graph of `partition` mutates."""

    def __init__(self, partition: Partition) -> None:
        updates = [one for one in partition.joint.updates if one.primal in partition.written_ahead]
        self._places, self._changes = [one.primal for one in updates], [one.version for one in updates]
        self._is_proven = False

    def __bool__(self) -> bool:
        return bool(self._places)

    def before(self, primals: Sequence[torch.Tensor]) -> Before:
        """Call this before the graph runs."""
        tensors = [primals[place] for place in self._places]
        copies = [None if self._is_proven else tensor.detach().clone() for tensor in tensors]
        return list(zip(tensors, versions_of(tensors), copies, strict=True))

    def after(self, before: Before) -> None:
        """Call this after the graph has run. Advances the version counters as eager would."""
        self._is_proven = True
        _count(before, self._changes)

    def undo(self, before: Before) -> bool:
        """Call this if the graph raised. Returns whether the inputs were restored."""
        if any(copy is None for _, _, copy in before):
            return False
        with torch.no_grad():
            for tensor, _, copy in before:
                tensor.copy_(copy)  # type: ignore[arg-type]
        _count(before, [0] * len(before))
        return True


def _count(before: Before, changes: Sequence[int]) -> None:
    pairs = zip(before, changes, strict=True)
    counted = [(tensor, version + more) for (tensor, version, _), more in pairs if version is not None]
    set_versions([tensor for tensor, _ in counted], [version for _, version in counted])
