"""Remove calls whose value nothing reads and that have no effect.

In: a joint graph. Out: the same without them; every placeholder stays. Calls that write to an argument, draw
random numbers (they move the generator), print, assert or wait are kept, and so is whatever their arguments
need. As in every ahead-of-time compiler, an error that only a removed call would have raised is not raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from retrograd._torch.operators import has_effect

__all__ = ["remove_dead_code"]

_FIXED = ("placeholder", "output")


def remove_dead_code(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Remove dead code from `gm`, in place.

    Args:
        gm: a graph of functional ATen operators.
        example_inputs: unused.
    """
    removed = [node for node in reversed(gm.graph.nodes) if _erased(node)]
    if removed:
        gm.delete_all_unused_submodules()
        gm.recompile()
    return gm


def _erased(node: fx.Node) -> bool:
    if node.users or node.op in _FIXED or has_effect(node):
        return False
    node.graph.erase_node(node)
    return True
