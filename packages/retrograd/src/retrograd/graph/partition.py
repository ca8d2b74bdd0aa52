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
        kind: `PRIMAL`: the placeholder number `place`; `OUTPUT`: the forward output number `place`;
            `INTERMEDIATE`: an additional output of the forward graph, also numbered `place`.
        value: fake tensor, or symbolic number.
        by_eager: whether eager keeps it too, so that it must not change in between.
        is_view: whether its memory is that of an input, an output, or another saved value.
    """

    name: str
    kind: SavedKind
    place: int
    value: Any
    by_eager: bool
    is_view: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is no tensor."""
        return not isinstance(self.value, torch.Tensor)

    @property
    def bytes(self) -> int:
        """Memory that lives only because it is saved; sizes that are symbolic count as at capture."""
        if self.is_number or self.is_view or self.kind is not SavedKind.INTERMEDIATE:
            return 0
        count = self.value.numel()
        if isinstance(count, torch.SymInt):  # not asked for its value, which would make it a constant
            count = count.node.hint or 0
        return int(count) * self.value.element_size()


@dataclass(frozen=True, eq=False)
class RegionBackward:
    """The backward of one region.

    Attributes:
        gm: takes the saved values, then the cotangents of the region's roots; gives its gradients, in the
            order of the signature.
        saved: which of the partition's saved values it takes.
        checked: primals and outputs that eager keeps for it and that are not saved as they are: like eager,
            the backward refuses to run if they have changed.
    """

    gm: fx.GraphModule
    saved: tuple[int, ...]
    checked: tuple[Saved, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What a policy chose, by the names of nodes of the joint graph.

    Attributes:
        saved: what is saved.
        copies: of those, what is saved as a copy.
    """

    saved: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Partition:
    """Forward and backward of a joint graph.

    Attributes:
        joint: what was divided.
        forward: takes the primals; gives the forward outputs of the signature, then the saved intermediates.
        saved: what is kept.
        backwards: one per region.
        copied: places among the forward's results whose memory belongs to a primal, or to a result before
            them: they are copied before anything is written. (Not in the graph, where a backend would leave
            the copy out.)
        choice: what the policy chose.
    """

    joint: JointValues
    forward: fx.GraphModule
    saved: tuple[Saved, ...]
    backwards: tuple[RegionBackward, ...]
    copied: tuple[int, ...] = ()
    choice: Choice = Choice()

    @property
    def saved_bytes(self) -> int:
        """Activation memory in bytes: what lives between forward and backward and belongs to neither inputs
        nor outputs."""
        return sum(saved.bytes for saved in self.saved)
