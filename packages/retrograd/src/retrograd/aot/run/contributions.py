"""Adds gradients that reach a call both directly and through its re-run.

In: the context of a region's node, and the autograd graph of a re-run, which is in the history of a
gradient. Out: the gradients that arrive at nodes of that graph in a later backward, so that the region adds
them in the right places. Eager has one graph for both runs, and adds at each node before a gradient flows on.

The nodes of the re-run are newer, so the engine reaches them first. We collect their gradients and leave
them undefined gradients, from which torch's own nodes compute nothing.
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
    """The gradients that arrived at re-run nodes of one region, by backward."""

    def __init__(self) -> None:
        self._arrived: dict[int, dict[Edge, torch.Tensor]] = {}
        self._last = -1

    def keep(self, ctx: Any, index: int, grads: Grads) -> Grads | None:
        """Store what arrives at node `index`, if this backward will still run the region's own node."""
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
        """What has arrived in this backward. Later gradients flow through the re-run's nodes."""
        self._last = backward_number()
        return self._arrived.pop(self._last, {})


def meet(ctx: Any, walk: RegionInterpreter) -> None:
    """Collect gradients at the nodes of `walk`, and of the regions below, for the nodes of the call. `ctx` is
    the context of the walked region."""
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
