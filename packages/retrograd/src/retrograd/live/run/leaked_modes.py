"""Modes that user code left switched, for what remains of its node call.

In: the call that left them, and the modes. Out: a context for each later call. Eager puts the thread's modes
back between nodes, not between the hooks of a node and the node itself: after a pre hook that leaves grad
mode on, the gradients of its own node have a history, those of the next node do not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx

from retrograd._torch.state import KeptModes, ModesKept
from retrograd.graph.backward_graph import Segment, call_of


class LeakedModes:
    """What one call left.

    Args:
        node: the call. modes: how it left them.
    """

    def __init__(self, node: fx.Node, modes: KeptModes) -> None:
        self._node_call = call_of(node).node_call
        self._modes = modes

    def reach(self, segment: Segment) -> bool:
        """Whether a call of `segment` belongs to the same node."""
        return any(call_of(node).node_call == self._node_call for node in segment.nodes)

    def around(self, node: fx.Node) -> AbstractContextManager[Any]:
        """The modes in which `node` runs: these if it belongs to the same node, else as they are."""
        return ModesKept(self._modes) if call_of(node).node_call == self._node_call else nullcontext()
