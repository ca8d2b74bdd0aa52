"""Hooks that run when the gradient of a leaf has accumulated.

In: the inputs of a call. Out: whether any has such hooks. They may free the gradient at once, as an optimizer
in backward does, so that it matters how many gradients there are at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["handles_made", "has_waiting_hooks", "hooks_of", "node_hooks"]


def has_waiting_hooks(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a leaf with post-accumulate-grad hooks."""
    return any(bool(value._post_accumulate_grad_hooks) for value in values if type(value) in _PLAIN)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def hooks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's own hooks, and those that run after its gradient has accumulated, each in order."""
    hooks, waiting = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return tuple((hooks or {}).values()), tuple((waiting or {}).values())


def handles_made() -> int:
    """How many handles of hooks torch has given out; the same number: nobody has registered a hook since."""
    count: int = RemovableHandle.next_id
    return count


class _AskedError(Exception):
    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks


def node_hooks(leaf: torch.Tensor) -> int:
    """How many Python hooks hang from the node that accumulates a leaf's gradient."""
    with torch.enable_grad():
        node = get_gradient_edge(leaf).node
    return _count(node.register_hook) + _count(node.register_prehook)


def _count(register: Callable[..., Any]) -> int:
    """How many hooks are where `register` would put one; torch gives the dictionary away, none is put
    there."""

    def ask(hooks: Any, hook: Any) -> Any:
        raise _AskedError(hooks)

    before = _HookMixin._register_hook
    _HookMixin._register_hook = staticmethod(ask)  # type: ignore[method-assign]
    try:
        register(None)
    except _AskedError as asked:
        return len(asked.hooks or ())
    finally:
        _HookMixin._register_hook = staticmethod(before)  # type: ignore[method-assign]
    return 0
