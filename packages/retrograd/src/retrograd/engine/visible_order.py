"""Tells whether a program can see in which order leaves accumulate.

In: leaves that receive their gradients at the same time. Out: whether anything may observe their order: hooks
on the leaves or on their nodes, the classes of leaves, or a dispatch mode. Nothing lists the C++ hooks of a
node. Reducers of ``torch.distributed`` set such hooks, so the order counts as visible while there is a
process group.

From the first leaf on, we see each hook that is registered. Earlier hooks we find when we first meet a leaf.
A leaf with the ``id`` of a freed one is so young that its hooks were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from retrograd.engine.graph_task import hooks_on, watch_hooks
from retrograd.engine.request import edge_of, leaf_of
from retrograd.process import ForkSafeLock
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.tensor import PLAIN_CLASSES

#: we remember that we have met this many leaves
MOST_KNOWN = 100_000


class _HooksSeen:
    """The hooks that were seen in this process.

    Attributes:
        on_leaves: whether a leaf ever had a hook, or is of a class that may observe what happens to it.
        on_nodes: whether a node in C++ ever had a hook. Torch does not say which node; it may be a leaf's.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._is_watching = self.on_leaves = self.on_nodes = False
        self._known: set[int] = set()

    def meet(self, leaves: Sequence[torch.Tensor]) -> None:
        """Look for hooks on leaves that we have not met."""
        if not self._known.issuperset(map(id, leaves)):
            self._look([leaf for leaf in leaves if id(leaf) not in self._known])

    @without_torch_functions
    def _look(self, leaves: Sequence[torch.Tensor]) -> None:
        with self._lock:
            if not self._is_watching:
                watch_hooks(self._registered)
                self._is_watching = True
        self.on_leaves |= any(map(_may_observe, leaves))
        nodes = [edge_of(leaf)[0] for leaf in leaves if type(leaf) in PLAIN_CLASSES]
        self.on_nodes |= any(hooks for node in nodes for _, hooks in hooks_on(node))
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known.update(map(id, leaves))

    def _registered(self, hooks: Any, node: Any) -> None:
        self.on_nodes |= node is None
        self.on_leaves |= leaf_of(node) is not None


_hooks = _HooksSeen()


def _may_observe(leaf: torch.Tensor) -> bool:
    return type(leaf) not in PLAIN_CLASSES or bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _all_may_be_observed() -> bool:
    is_distributed = distributed.is_available() and distributed.is_initialized()
    return _hooks.on_nodes or is_distributed or torch._C._len_torch_dispatch_stack() > 0


def any_order_is_visible() -> bool:
    """Whether anything may observe in which order leaves that we have met accumulate."""
    return _hooks.on_leaves or _all_may_be_observed()


def order_is_visible(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether anything may observe in which order `leaves` accumulate."""
    _hooks.meet(leaves)
    return _all_may_be_observed() or (_hooks.on_leaves and any(map(_may_observe, leaves)))
