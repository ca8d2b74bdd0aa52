"""Tells whether a program can see in which order leaves accumulate.

In: leaves that receive their gradients at the same time. Out: whether anything may observe their order: hooks
on leaves or on their nodes, gradients that are there already (in-place sums change memory that others may
read), the classes of leaves, or a dispatch mode. Nothing lists the C++ hooks of a node. Reducers of
``torch.distributed`` set such hooks, so the order counts as visible while there is a process group.

From the first leaf on, we see each hook that is registered. Earlier hooks we find when we first meet a leaf.
A leaf with the ``id`` of a freed one is so young that its hooks were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
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
    """Whether a leaf, or a node in C++, ever had a hook in this process. Torch does not say which node has
    it; it may be a leaf's. Hooks of a leaf may move to another one (``torch.utils.swap_tensors``)."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._is_watching = self.any = False
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
        self.any |= any(map(_may_observe, leaves))
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known.update(map(id, leaves))

    def _registered(self, hooks: Any, node: Any) -> None:
        self.any |= node is None or leaf_of(node) is not None


def _may_observe(leaf: torch.Tensor) -> bool:
    if type(leaf) not in PLAIN_CLASSES or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return True
    return any(hooks for _, hooks in hooks_on(edge_of(leaf)[0]))


_hooks = _HooksSeen()


_gradient = attrgetter("grad")


def hooks_may_see_order(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether hooks that are there already may observe in which order `leaves` accumulate."""
    _hooks.meet(leaves)
    return _may_be_hooks()


def order_is_visible(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether anything may observe in which order `leaves`, which `hooks_may_see_order` knows, accumulate
    now."""
    if _may_be_hooks() or torch._C._len_torch_dispatch_stack():
        return True
    return any(grad is not None for grad in map(_gradient, leaves))


def _may_be_hooks() -> bool:
    return _hooks.any or (distributed.is_available() and distributed.is_initialized())
