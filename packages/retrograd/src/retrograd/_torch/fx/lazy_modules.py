"""Graph modules whose Python code is written when it is first asked for.

In: an FX graph. Out: a module for those who only read or change the graph: writing code takes as long as
tracing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module


def lazily() -> AbstractContextManager[None]:
    """Inside, torch's own functions make such modules."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def lazy_graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A module of `graph`, with the constants of `root`."""
    with lazily():
        return _make_graph_module(root, graph, name)
