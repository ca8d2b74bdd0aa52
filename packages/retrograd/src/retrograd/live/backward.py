"""One backward on its way through the stages: what was asked, and the autograd graph that it runs over.

In: an `EngineRequest`, and later which node call the plan is entering. Out: the live graph, both orders of
its nodes, and the answers to what user code asks of the engine. The graph is read when somebody first asks.
"""

from __future__ import annotations

import functools
from typing import Any

from retrograd._torch.autograd import EngineRequest, leaf_of, read_live_graph
from retrograd.graph.eager_order import ROOT, LiveGraph, eager_walk, engine_walk

_NOT_OF_LEAVES = (
    "A leaf node was passed to _will_engine_execute_node but we are currently running autograd.grad(). "
    "This is currently not supported."
)


class LiveBackward:
    """One backward.

    Attributes:
        asked: as given. request: what the engine is asked: perhaps for the gradients of more inputs.
        node_call: the node call whose user code the plan runs now.
    """

    def __init__(self, asked: EngineRequest) -> None:
        self.asked = self.request = asked
        self.node_call = 0

    @functools.cached_property
    def asked_graph(self) -> LiveGraph:
        """The live graph, as `asked` needs it."""
        return read_live_graph(self.asked)

    @functools.cached_property
    def graph(self) -> LiveGraph:
        """The live graph, as `request` needs it."""
        return self.asked_graph if self.request is self.asked else read_live_graph(self.request)

    @functools.cached_property
    def walk(self) -> list[int]:
        """Indices of the graph's nodes, by node call."""
        return engine_walk(self.graph)

    @functools.cached_property
    def node_calls(self) -> list[Any]:
        """The autograd nodes by node call; None for the graph root."""
        return [None if i == ROOT else self.graph.nodes[i].handle for i in self.walk]

    # what user code asks

    def current_node(self) -> Any:
        """The autograd node that eager would be executing."""
        return self.node_calls[self.node_call]

    def will_execute(self, node: Any) -> bool:
        """Whether eager executes `node` in this backward.

        Raises:
            RuntimeError: eager does not say so of leaves inside ``autograd.grad``.
        """
        if not self.asked.accumulate_grad and leaf_of(node) is not None:
            raise RuntimeError(_NOT_OF_LEAVES)
        index = next((i for i, live in enumerate(self.graph.nodes) if live.handle is node), None)
        return index is not None and (self.graph.wanted is None or index in self.graph.wanted)

    def execution_order(self) -> list[Any]:
        """The nodes in the order in which eager executes them."""
        return [self.graph.nodes[i].handle for i in eager_walk(self.graph) if i != ROOT]
