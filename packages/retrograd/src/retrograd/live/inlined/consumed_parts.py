"""Compiled functions of which a part has been differentiated, and may not be again.

In: the backwards that run. Out: eager's error where eager's nodes would have released what they saved. The
engine keeps such a function's saved tensors for its other parts, and would not notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd._torch.autograd import EngineRequest, edge_of, run_stock, window
from retrograd.graph.backward_graph import BackwardGraph

#: by the context of a compiled function: which of eager's nodes in it have released what they saved.
_used: weakref.WeakKeyDictionary[Any, frozenset[float]] = weakref.WeakKeyDictionary()


def use_up(backward: BackwardGraph, request: EngineRequest, nodes: Callable[[], Sequence[Any]]) -> None:
    """Note what a backward is about to use.

    Args:
        backward, request: the backward. nodes: gives its autograd nodes by node call.

    Raises:
        RuntimeError: eager's, if a part has been used already.
    """
    if not backward.inlined:
        return
    parts = backward.intact_calls()
    if not (_used or parts or request.added):
        return
    found = nodes()
    for index, keys in _used_now(backward, request, found).items():
        before = _used.get(found[index], frozenset())
        if before & keys:
            _raise_as_eager()
        # What the engine releases it watches itself.
        if not request.keep_graph and (index in parts or request.added):
            _used[found[index]] = before | keys


def _used_now(
    backward: BackwardGraph, request: EngineRequest, nodes: Sequence[Any]
) -> dict[int, frozenset[float]]:
    """By inlined node call, what this backward uses: all of it, or what leads to an output asked for."""
    used = {index: inlined.consumed for index, inlined in backward.inlined.items()}
    if request.added:
        edges = [edge_of(tensor) for tensor in request.as_asked().inputs]
        for index in used:
            slots = [slot for node, slot in edges if node is nodes[index]]
            if slots:
                used[index] = frozenset().union(*map(backward.inlined[index].consumed_for.__getitem__, slots))
    return used


def _raise_as_eager() -> None:
    """What torch raises where a graph is used a second time, in the words of the installed torch."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    with window.stock():
        run_stock(request)
        run_stock(request)
