"""A backward cut into steps: what is compiled together, what runs as eager runs it, and when values die.

In: made by ``live.capture.cut`` from a `BackwardGraph` in eager's order. Out: read by ``live.run.plan``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from retrograd.graph.emit import last_uses


@dataclass(frozen=True)
class Segment:
    """Functional calls between two opaque ones.

    Attributes:
        nodes: the calls, in order.
        inputs: values from before that they read.
        outputs: values of theirs that are read later.
        worth_compiling: whether it holds a node call, not only checks, sums and projections.
        interpret_because: why it is a segment of its own that is not compiled; empty if it is compiled.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    worth_compiling: bool
    interpret_because: str = ""


@dataclass(frozen=True)
class OpaqueCall:
    """One call that runs as eager runs it, with the projections of its result.

    Attributes:
        node: the call. projections: its ``getitem`` nodes.
        reason: why it is opaque.
    """

    node: fx.Node
    projections: tuple[fx.Node, ...]
    reason: str


@dataclass(frozen=True)
class Accumulation:
    """One accumulation into ``.grad``: `node`'s arguments are the variable and the gradient."""

    node: fx.Node


PlanStep = Segment | OpaqueCall | Accumulation


@dataclass(frozen=True)
class Schedule:
    """The steps in order; ``dying[i]`` are the values that no step after number i reads."""

    steps: tuple[PlanStep, ...]
    dying: tuple[frozenset[fx.Node], ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order."""
        return tuple(step for step in self.steps if isinstance(step, Segment))

    @property
    def opaque_calls(self) -> tuple[OpaqueCall, ...]:
        """The opaque calls, in order."""
        return tuple(step for step in self.steps if isinstance(step, OpaqueCall))


def dying_values(
    reads: Sequence[Iterable[fx.Node]], outputs: Iterable[fx.Node | None]
) -> tuple[frozenset[fx.Node], ...]:
    """For each step, the values that no later step reads.

    Args:
        reads: by step, the values that it reads or makes. outputs: outlive all steps.
    """
    kept = [node for node in outputs if node is not None]
    last = last_uses([*enumerate(reads), (len(reads), kept)])
    return tuple(frozenset(last.get(number, ())) for number in range(len(reads)))
