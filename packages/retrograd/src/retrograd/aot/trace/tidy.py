"""Leave out of a fresh joint graph what only tracing needed.

In: a joint graph as traced. Out: the same graph without aliases that stand for the very tensor, copies with
which inputs entered, running statistics that a batch norm in training does not read, and calls that nothing
reads.
"""

from __future__ import annotations

import torch
from torch import fx

from retrograd._torch.fx import has_effect
from retrograd._torch.trace import without_tokens

_aten = torch.ops.aten
#: backwards that take running statistics, but read them in evaluation mode only.
_BATCH_NORM_BACKWARD = {_aten.native_batch_norm_backward.default, _aten.batch_norm_backward.default}
_STATISTICS, _TRAINING = (3, 4), 7
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}


def tidy(gm: fx.GraphModule) -> None:
    """Change `gm` in place."""
    without_tokens(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
        elif node.target in _BATCH_NORM_BACKWARD and node.args[_TRAINING] is True:
            for place in _STATISTICS:
                node.update_arg(place, None)
    _drop_dead(gm.graph)
    gm.recompile()


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            graph.erase_node(node)
