"""FX graph modules that take their inputs as one list and let each go after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from retrograd._torch.fx.nodes import add_copy


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of `graph`."""
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = add_copy(copy, node, made.__getitem__)
    return copy


def boxed(graph: fx.Graph, root: torch.nn.Module | None = None) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that runs `graph`, which is its own from now on; `root` has its constants."""
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root or torch.nn.Module(), graph).forward
