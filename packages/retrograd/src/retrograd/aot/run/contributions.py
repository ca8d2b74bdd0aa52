"""Gradients that meet in a call and in its second run.

In: the context of a region's node, and the autograd graph of a second run, which is in the history of a
gradient. Out: what arrives at nodes of that graph in a later backward, so that the region adds it there.
Eager has one graph for both runs: it adds at each node, before a gradient goes further down.

Nodes of a second run are newer, so the engine comes to them first. They are left with undefined gradients, of
which torch's own nodes make nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from retrograd.aot.trace.backward import RegionInterpreter, added
from retrograd.engine import backward_number, will_execute
from retrograd.graph.eager_order import Edge

Grads = Sequence[torch.Tensor | None]


class Meeting:
    """What has arrived at nodes of second runs of one region, by backward."""

    def __init__(self) -> None:
        self._arrived: dict[int, dict[Edge, torch.Tensor]] = {}
        self._last = -1

    def keep(self, ctx: Any, index: int, grads: Grads) -> Grads | None:
        """Keep what arrives at node `index`, if the backward still comes to the region's own node."""
        now = backward_number()
        if now == self._last or not will_execute(ctx) or not ctx.run.can_be_rerun(ctx):
            return None
        kept = self._arrived.setdefault(now, {})
        for slot, grad in enumerate(grads):
            if grad is not None:
                edge = Edge(index, slot)
                kept[edge] = added(kept.get(edge), grad)
        return (None,) * len(grads)

    def arrived(self) -> Mapping[Edge, torch.Tensor]:
        """What has arrived in this backward. What comes later goes down by itself."""
        self._last = backward_number()
        return self._arrived.pop(self._last, {})


def meet(ctx: Any, walk: RegionInterpreter) -> None:
    """Have what arrives at the nodes of `walk`, and of the regions below, kept for the nodes of the call.
    `ctx` is the context of the region that is walked."""
    waiting, seen = [ctx], set[int]()
    while waiting:
        one = waiting.pop()
        if (
            one is None
            or getattr(one, "replay_record", None) is not ctx.replay_record
            or one.run.number in seen
        ):
            continue
        seen.add(one.run.number)
        one.meeting = one.meeting or Meeting()
        for index in walk.structure.regions[one.run.number].nodes:
            handle = walk.graph.nodes[index].handle
            handle.register_prehook(partial(one.meeting.keep, one, index))
        waiting += [below for below, _ in one.next_functions]
