"""Memory that shows an element in several places, where Inductor would write to one of them.

In: a graph behind Inductor's joint passes. Out: the same graph, with copies in memory of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from retrograd._torch.tensor import has_overlaps

aten = torch.ops.aten

#: what Inductor does in place where nothing else reads the memory (``inplaceable_ops``, ``reinplace.py``). It
#: does not ask whether that is an expanded row: then all rows would be written.
_IN_PLACE = (aten.index_put.default, aten._unsafe_index_put.default)


def part_overlaps(graph: fx.Graph) -> list[fx.Node]:
    """Copy what has overlaps before a call that Inductor may do in place, as eager's call does. Returns the
    copies."""
    copies = []
    for target in _IN_PLACE:
        for node in graph.find_nodes(op="call_function", target=target):
            given: Any = node.args[0]
            if has_overlaps(given.meta["val"]):
                with graph.inserting_before(node):
                    copies.append(graph.call_function(aten.clone.default, (given,)))
                node.update_arg(0, copies[-1])
    return copies
