"""A joint graph, divided into what runs forward and what runs backward.

In: made by ``aot.partition``. Out: read by ``aot.compile``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from retrograd.graph.joint_graph import JointValues

__all__ = ["Partition", "RegionBackward", "Saved", "SavedKind"]


class SavedKind(enum.Enum):
    """Where a saved value comes from when the forward has run."""

    PRIMAL = "primal"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"


@dataclass(frozen=True, eq=False)
class Saved:
    """A value that the forward keeps for the backward.

    Attributes:
        name: of its node in the joint graph.
        kind: `PRIMAL`: the placeholder number `place`; `OUTPUT`: the forward output number `place`; `INTERMEDIATE`:
            an additional output of the forward graph, also numbered `place`.
        value: fake tensor, or symbolic number.
        by_eager: whether eager keeps it too, so that it must not change in between.
    """

    name: str
    kind: SavedKind
    place: int
    value: Any
    by_eager: bool

    @property
    def is_number(self) -> bool:
        """Whether it is no tensor."""
        return not isinstance(self.value, torch.Tensor)

    @property
    def bytes(self) -> int:
        """Memory that lives only because it is saved; sizes that are symbolic count as at capture."""
        if self.is_number or self.kind is not SavedKind.INTERMEDIATE:
            return 0
        numel = self.value.numel()
        if isinstance(numel, torch.SymInt):  # int() would tie it to this number
            numel = numel.node.hint or 0
        return int(numel) * int(self.value.element_size())


@dataclass(frozen=True, eq=False)
class RegionBackward:
    """The backward of one region.

    Attributes:
        gm: takes the saved values, then the cotangents of the region's roots; gives its gradients, in the order of the
            signature.
        saved: which of the partition's saved values it takes.
        checked: forward outputs (by number) that eager keeps for it in a form that is not saved.
        checked_primals: placeholders of the same kind.
    """

    gm: fx.GraphModule
    saved: tuple[int, ...]
    checked: tuple[int, ...] = ()
    checked_primals: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Partition:
    """Forward and backward of a joint graph.

    Attributes:
        joint: what was divided.
        forward: takes the primals; gives the forward outputs of the signature, then the saved intermediates.
        saved: what is kept.
        backwards: one per region.
    """

    joint: JointValues
    forward: fx.GraphModule
    saved: tuple[Saved, ...]
    backwards: tuple[RegionBackward, ...]

    @property
    def saved_bytes(self) -> int:
        """Activation memory in bytes: what lives between forward and backward and belongs to neither inputs nor
        outputs."""
        return sum(saved.bytes for saved in self.saved)
