"""Release the saved tensors of chosen autograd nodes, as a backward without ``retain_graph`` does.

In: a `LiveGraph`, the backward that it belongs to, and which of its nodes. Out: nothing; those nodes, and no
others, have dropped what they saved.

torch offers no such call. But the engine releases whatever it has handed over, so it is made to hand over
exactly these nodes, and what it hands over is dropped. It takes whole paths, so a set of nodes must hold
every node on a path between two of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from retrograd._torch.autograd.collection import collect
from retrograd._torch.autograd.engine import EngineRequest
from retrograd.graph.live_graph import LiveGraph


def request_to_release(
    live: LiveGraph, request: EngineRequest, nodes: Collection[int], from_roots: bool
) -> EngineRequest:
    """The backward whose nodes are `nodes`.

    Args:
        live: the graph of `request`. nodes: indices in it.
        from_roots: whether the nodes are all those above them too, so that the roots of `request` serve.
    """
    ends = [i for i in nodes if not any(edge and edge.node in nodes for edge in live.nodes[i].edges)]
    inputs = tuple(GradientEdge(live.nodes[i].handle, 0) for i in ends)
    if from_roots:
        return EngineRequest(request.tensors, request.grad_tensors, False, False, inputs, True)
    followers = {edge.node for i in nodes for edge in live.nodes[i].edges if edge}
    heads = [live.nodes[i].handle for i in nodes if i not in followers]
    roots = tuple(GradientEdge(node, 0) for node in heads)
    return EngineRequest(roots, tuple(map(_cotangent, heads)), False, False, inputs, True)


def release(request: EngineRequest, factory: Callable[[], Any]) -> None:
    """Have the engine hand over the nodes of `request`, and drop everything.

    Raises:
        Refusal: another thread is in a backward.
        Exception: the engine refused; nothing was released then.
    """
    collect(request, factory, lambda call: None)


def keeps_saved_tensors(node: Any) -> bool:
    """Whether an autograd node has saved tensors that Python can see."""
    return any(name.startswith("_raw_saved_") for name in dir(node))


def _cotangent(node: Any) -> torch.Tensor:
    """Something of the metadata of a node's first gradient; it takes no memory."""
    metadata = node._input_metadata[0]
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)
