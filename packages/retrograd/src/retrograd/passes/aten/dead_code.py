"""Remove calls without effect whose value nothing reads.

In: a joint graph. Out: the same without them. Every placeholder stays. Calls are kept that write to an
argument, draw random numbers (which moves the generator), print, assert or wait, with everything that their
arguments need. As in every ahead-of-time compiler, an error that only a removed call would raise is not
raised.
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
        gm.recompile()  # the code before reads them
    return gm
