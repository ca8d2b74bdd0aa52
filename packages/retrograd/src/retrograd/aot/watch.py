"""What a function depends on besides its arguments: modules, and what it closes over.

In: a function or module. Out: `Watched`, which tells whether a capture still stands.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

__all__ = ["Watched"]

_HOLDERS = (nn.Module, torch.Tensor)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


class Watched:
    """The modules and values that `fn` refers to, as they are now."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._bound: list[Any] = []
        while isinstance(fn, functools.partial):
            self._bound += [*fn.args, *fn.keywords.values()]
            fn = fn.func
        self._bound.append(fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None))
        self._fn, is_python = fn, hasattr(fn, "__code__")
        self._cells: tuple[Any, ...] = (is_python and fn.__closure__) or ()
        self._globals: dict[str, Any] = fn.__globals__ if is_python else {}
        self._names: tuple[str, ...] = fn.__code__.co_names if is_python else ()
        self._referred = self._referred_now()
        roots = [value for value in (*self._bound, *self._referred) if isinstance(value, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        self._modules = tuple(modules)
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._counts = [(m._parameters, len(m._parameters)) for m in modules]
        self._registered = -1
        self._hooked = False

    def is_intact(self) -> bool:
        """Whether everything is still what it was, but for tensors and switches."""
        for children, before in self._children:
            if len(children) != len(before) or list(map(id, children.values())) != list(map(id, before)):
                return False
        for parameters, count in self._counts:
            if len(parameters) != count:
                return False
        now = self._referred_now()
        return len(now) == len(self._referred) and all(map(operator.is_, now, self._referred))

    def _referred_now(self) -> list[Any]:
        """What may change of what the function refers to: cells, defaults, and globals that are tensors or modules."""
        names = self._globals
        found = [names[name] for name in self._names if isinstance(names.get(name), _HOLDERS)]
        for cell in self._cells:
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not bound yet
                found.append(None)
        if defaults := getattr(self._fn, "__defaults__", None):
            found += defaults
        return found

    def switches(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for module in self._modules])

    def has_hooks(self) -> bool:
        """Whether any of the modules has hooks."""
        if self._hooked or RemovableHandle.next_id != self._registered:
            self._registered = RemovableHandle.next_id
            self._hooked = any(getattr(m, name) for m in self._modules for name in _HOOKS) or any(
                getattr(torch_module, name) for name in _GLOBAL_HOOKS
            )
        return self._hooked
