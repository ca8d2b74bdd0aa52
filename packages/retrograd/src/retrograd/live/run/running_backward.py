"""A plan under way, as user code may ask about it.

In: the request, and which node call the plan is entering. Out: answers for ``_torch.autograd.queries``. The
live graph is read only if somebody asks.
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


class RunningBackward:
    """Answers for one run of one plan.

    Args:
        request: what is being run; None if nobody knows, because stock compiled autograd runs the plan.
    """

    def __init__(self, request: EngineRequest | None) -> None:
        self._request = request
        self.node_call = 0

    def enter(self, node_call: int) -> None:
        """The plan is about to run user code of this node call."""
        self.node_call = node_call

    @functools.cached_property
    def _live(self) -> LiveGraph:
        if self._request is None:
            return LiveGraph((), (), None)
        return read_live_graph(self._request)

    @functools.cached_property
    def node_calls(self) -> list[Any]:
        """The autograd nodes by node-call index; None for the graph root."""
        return [None if i == ROOT else self._live.nodes[i].handle for i in engine_walk(self._live)]

    def current_node(self) -> Any:
        """The autograd node that eager would be executing."""
        return self.node_calls[self.node_call]

    def will_execute(self, node: Any) -> bool:
        """Whether eager executes `node` in this backward.

        Raises:
            RuntimeError: eager does not say so of leaves inside ``autograd.grad``.
        """
        if self._request is not None and not self._request.accumulate_grad and leaf_of(node) is not None:
            raise RuntimeError(_NOT_OF_LEAVES)
        index = next((i for i, live in enumerate(self._live.nodes) if live.handle is node), None)
        return index is not None and (self._live.wanted is None or index in self._live.wanted)

    def execution_order(self) -> list[Any]:
        """The nodes in the order in which eager executes them."""
        return [self._live.nodes[i].handle for i in eager_walk(self._live) if i != ROOT]
