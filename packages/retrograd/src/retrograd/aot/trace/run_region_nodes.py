"""Run one region of an autograd graph by hand, in eager's order.

In: the graph, its division, and cotangents for a region's roots. Out: gradients for its destinations. Sums
are made in the order in which the engine would make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from retrograd._torch.autograd import call_node, fitted, input_count, refuse_nan
from retrograd.aot.trace.structure import Structure
from retrograd.graph.eager_order import Edge, LiveGraph, LiveNode
from retrograd.graph.joint import Destination


@dataclass
class Walk:
    """One region.

    Attributes:
        graph, structure: the autograd graph and its division.
        primals: by node that ends the graph, the primal that it stands for.
        number: of the region.
        around: a context around the call of each node.
        checks: refuse gradients that are not numbers, as anomaly mode does.
    """

    graph: LiveGraph
    structure: Structure
    primals: Mapping[int, int]
    number: int
    around: Callable[[LiveNode], AbstractContextManager[Any]]
    checks: bool = False
    _grads: dict[int, list[Any]] = field(default_factory=dict)
    _found: dict[Destination, Any] = field(default_factory=dict)

    def run(self, cotangents: Mapping[int, Any]) -> dict[Destination, Any]:
        """Gradients of the region's destinations; None where undefined.

        Args:
            cotangents: by boundary; None is undefined.

        Raises:
            Refusal: a node gives what the engine would refuse.
            Exception: whatever a node raises.
        """
        region = self.structure.regions[self.number]
        self._found = dict.fromkeys(region.destinations)
        self._sends = region.sends
        for root in region.roots:
            if cotangents[root] is not None:
                self._add_inside(self.structure.boundaries[root], cotangents[root])
        for node in region.nodes:
            self._call(node)
        return self._found

    def _call(self, index: int) -> None:
        node = self.graph.nodes[index]
        grads = self._grads.pop(index, None)
        if grads is None:
            return
        with self.around(node):
            results = call_node(node.handle, grads)
            if self.checks:
                refuse_nan(node.name, results)
            for place, (edge, grad) in enumerate(zip(node.edges, results, strict=True)):
                if edge is not None and grad is not None:
                    grad = fitted(self.graph.nodes[edge.node].handle, edge.slot, grad)
                    self._send(self._sends.get((index, place)), edge, grad)

    def _send(self, there: Destination | None, edge: Edge, grad: Any) -> None:
        if there is None:
            self._add_inside(edge, grad)
        else:
            known = self._found[there]
            self._found[there] = grad if known is None else known + grad

    def _add_inside(self, edge: Edge, grad: Any) -> None:
        count = input_count(self.graph.nodes[edge.node].handle)
        slots = self._grads.setdefault(edge.node, [None] * count)
        slots[edge.slot] = grad if slots[edge.slot] is None else slots[edge.slot] + grad
