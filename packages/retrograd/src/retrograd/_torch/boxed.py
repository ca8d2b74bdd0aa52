"""FX graph modules that take their inputs as one list and let each go after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

__all__ = ["boxed_module"]


def boxed_module(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that runs `gm` boxed. `gm` itself is left as it is."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(gm, graph).forward
