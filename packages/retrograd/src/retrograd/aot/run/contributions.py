"""Adds gradients that reach a call both directly and through its re-run.

In: the context of a region's node, and the autograd graph of a re-run, which is in the history of a
gradient. Out: the gradients that arrive at nodes of that graph in a later backward, so that the region adds
them in the right places. Eager has one graph for both runs, and adds at each node before a gradient flows on.

The nodes of the re-run are newer, so the engine reaches them first. We collect their gradients and leave
them undefined gradients, from which torch's own nodes compute nothing. What arrives at a result of the call
must reach the result that the caller got, with its hooks. So a gradient's history also leads to a node of
ours, a `Delivery`, which is older than the re-run: the engine comes to it when the re-run's nodes are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from retrograd.aot.trace.backward import RegionInterpreter, added
from retrograd.engine import backward_number, edge_of, nodes_below, will_execute
from retrograd.graph.eager_order import Edge
from retrograd.graph.reach import reached

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

    def take(self, edge: Edge) -> torch.Tensor | None:
        """What has arrived at `edge` in this backward, which then flows on elsewhere."""
        return self._arrived.get(backward_number(), {}).pop(edge, None)

    def arrived(self) -> Mapping[Edge, torch.Tensor]:
        """What has arrived in this backward. Later gradients flow through the re-run's nodes."""
        self._last = backward_number()
        return self._arrived.pop(self._last, {})


class Delivery(torch.autograd.Function):
    """Hands what arrived at a result of a re-run to that result of the call."""

    @staticmethod
    def forward(ctx: Any, meeting: Meeting, result: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor behind this node. ``edge``, of the re-run, is set later."""
        ctx.set_materialize_grads(False)
        ctx.meeting, ctx.edge = meeting, None
        return torch.empty(0, dtype=result.dtype, device=result.device)

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[None, torch.Tensor | None]:
        """Return what arrived."""
        return None, ctx.meeting.take(ctx.edge)


class Link(torch.autograd.Function):
    """A gradient, with a history that leads to deliveries as well."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *deliveries: torch.Tensor) -> torch.Tensor:
        """Return an alias of the gradient."""
        ctx.set_materialize_grads(False)
        ctx.count = len(deliveries)
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Pass the gradient on."""
        return grad, *(None,) * ctx.count


def _below(record: Any, ctx: Any) -> list[Any]:
    """The contexts of the regions of the same call that get gradients from this one."""
    return [one for one, _ in ctx.next_functions if getattr(one, "replay_record", None) is record]


class Meetings:
    """The meetings of a re-run, whose gradients have a history.

    Make it before the function runs again. `meet` connects it with the re-run's graph, and `linked` the
    gradients with the results of the call.

    Args:
        ctx: the context of the region that is run again.
    """

    def __init__(self, ctx: Any) -> None:
        self._contexts = reached([ctx], partial(_below, ctx.replay_record))
        #: by the boundary of a result: an empty tensor with a `Delivery` as its node.
        self._deliveries: dict[int, torch.Tensor] = {}
        self._by_node: dict[Any, list[torch.Tensor]] = {}
        #: where the search for them ends.
        self._ends = set[Any]()
        for one in self._contexts:
            one.meeting = one.meeting or Meeting()
            for slot, root in enumerate(one.run.roots):
                result = one.results[slot]()
                if result is not None and edge_of(result) == (one, slot):
                    self._deliveries[root] = Delivery.apply(one.meeting, result)

    def meet(self, walk: RegionInterpreter) -> None:
        """Collect gradients at the nodes of `walk` for the nodes of the call."""
        for one in self._contexts:
            for index in walk.structure.regions[one.run.number].nodes:
                handle = walk.graph.nodes[index].handle
                handle.register_prehook(partial(one.meeting.keep, one, index))
        for root, delivery in self._deliveries.items():
            edge = walk.structure.boundaries[root]
            cast(Any, delivery.grad_fn).edge = edge
            self._by_node.setdefault(walk.graph.nodes[edge.node].handle, []).append(delivery)
        self._ends = {walk.graph.nodes[index].handle for index in walk.primals} | self._by_node.keys()

    def linked(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients; the history of each leads to the results of the call whose nodes it depends on."""
        edges = [None if grad is None else edge_of(grad) for grad in grads]
        above: dict[Any, list[Any]] = {}
        for node in nodes_below([edge for edge in edges if edge is not None], self._ends):
            for below, _ in () if node in self._ends else node.next_functions:
                above.setdefault(below, []).append(node)
        found: list[list[torch.Tensor]] = [[] for _ in grads]
        for node, here in self._by_node.items():
            leading = reached([node], lambda one: above.get(one, ()))
            for deliveries, edge in zip(found, edges, strict=True):
                if edge is not None and edge[0] in leading:
                    deliveries += here
        pairs = zip(grads, found, strict=True)
        return [Link.apply(grad, *deliveries) if deliveries else grad for grad, deliveries in pairs]
