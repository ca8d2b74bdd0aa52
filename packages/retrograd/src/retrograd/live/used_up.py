"""Compiled functions of which a part has been differentiated, and may not be again.

In: the backwards that run. Out: eager's error where eager's nodes would have released what they saved. The
engine keeps such a function's saved tensors for its other parts, and would not notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograd._torch.engine import EngineRequest, run_stock
from retrograd._torch.window import window
from retrograd.graph.backward_graph import BackwardGraph

__all__ = ["use_up"]

#: by the context of a compiled function: which of eager's nodes in it have released what they saved.
_used: weakref.WeakKeyDictionary[Any, frozenset[float]] = weakref.WeakKeyDictionary()


def use_up(backward: BackwardGraph, request: EngineRequest, nodes: Callable[[], Sequence[Any]]) -> None:
    """Note what a backward is about to use.

    Args:
        backward, request: the backward. nodes: gives its autograd nodes by node call.

    Raises:
        RuntimeError: eager's, if a part has been used already.
    """
    if not backward.consumed or not (_used or backward.intact):
        return
    contexts = {index: nodes()[index] for index in backward.consumed}
    for index, keys in backward.consumed.items():
        if _used.get(contexts[index], frozenset()) & keys:
            _raise_as_eager()
    if not request.keep_graph:
        for index in backward.intact:
            before = _used.get(contexts[index], frozenset())
            _used[contexts[index]] = before | backward.consumed[index]


def _raise_as_eager() -> None:
    """What torch raises where a graph is used a second time, in the words of the installed torch."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    request = EngineRequest((root,), (torch.ones(()),), False, False, (), accumulate_grad=True)
    with window.stock():
        run_stock(request)
        run_stock(request)
