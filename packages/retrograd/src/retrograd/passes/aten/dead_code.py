"""Remove calls that have no effect and whose value nothing reads.

In: a joint graph. Out: the same graph without them. Every placeholder stays. A call stays, with everything on
which its arguments depend, if it writes to an argument, draws random numbers (which advances the generator),
prints, asserts or waits. As in every ahead-of-time compiler, an error that only a removed call would raise is
not raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrograd.graph.fx import has_effect

_FIXED = ("placeholder", "output")


def remove_dead_code(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Remove dead code from `gm`, in place."""
    has_lost_a_reader = False
    for node in reversed(gm.graph.nodes):
        if not node.users and node.op not in _FIXED and not has_effect(node):
            has_lost_a_reader |= node.op == "get_attr"
            gm.graph.erase_node(node)
    if has_lost_a_reader:
        gm.delete_all_unused_submodules()
        gm.recompile()  # the old code reads the removed attributes
    return gm
