"""What a function depends on besides its arguments: modules, and what it closes over.

In: a function or module. Out: `Watched`, which tells whether a capture still stands.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from retrograd.errors import CaptureError, Reason

__all__ = ["Watched"]

_SCALARS = (bool, int, float, complex, str, bytes)
#: how much of a container is looked at.
_MOST = 64
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
        self._fn = fn
        self._cells = tuple(_referred(fn))
        roots = [value for value in self._cells if isinstance(value, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        self._modules = tuple(modules)
        self._children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        self._counts = [
            (holder, len(holder)) for m in modules for holder in (m._modules, m._parameters, m._buffers)
        ]
        self._settings = [
            (vars(owner), key, value)
            for owner in (*modules, *_owners(fn))
            for key, value in vars(owner).items()
            if isinstance(value, _SCALARS) and key != "training"
        ]
        self._contents = [(c, _content(c)) for c in self._cells if isinstance(c, (list, dict, set))]
        self.note()
        self._registered = -1
        self._hooked = False

    def is_intact(self) -> bool:
        """Whether everything is still what it was, but for tensors and switches."""
        return (
            all(holder.get(name) is child for holder, name, child in self._children)
            and all(len(holder) == count for holder, count in self._counts)
            and all(
                holder.get(key) is value or _same([holder.get(key)], [value])
                for holder, key, value in self._settings
            )
            and all(_same(_content(container), content) for container, content in self._contents)
            and all(now is before for now, before in zip(_referred(self._fn), self._cells, strict=False))
        )

    def note(self) -> None:
        """Remember what `refuse_changes` compares with."""
        self._attributes = [_attributes(module) for module in self._modules]

    def refuse_changes(self) -> None:
        """Look for what the function left behind when it was captured: what it set or changed in Python.

        Raises:
            CaptureError: there is something. Attributes of modules are as before.
        """
        for container, content in self._contents:
            if not _same(_content(container), content):
                raise _left_behind(f"changes a {type(container).__name__} that it closes over")
        for module, before in zip(self._modules, self._attributes, strict=True):
            now = _attributes(module)
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
                changed = sorted(key for key in {*now, *before} if now.get(key) is not before.get(key))
                for key in changed:
                    if key in before:
                        module.__dict__[key] = before[key]
                    else:
                        del module.__dict__[key]
                raise _left_behind(f"sets {changed[0]} of {type(module).__name__}")

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


def _owners(fn: Any) -> list[Any]:
    """The object of a bound method, whose settings it may read."""
    owner = getattr(fn, "__self__", None)
    return [owner] if hasattr(owner, "__dict__") and not isinstance(owner, (type, nn.Module)) else []


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides tensors, modules and hooks."""
    return {
        key: value for key, value in vars(module).items() if not key.startswith("_") or key.startswith("__")
    }


def _content(container: Any) -> list[Any]:
    """The first things in a container."""
    flat = container.items() if isinstance(container, dict) else ((value,) for value in container)
    return [value for pair in itertools.islice(flat, _MOST) for value in pair]


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and isinstance(a, _SCALARS) and a == b)
        for a, b in zip(now, before, strict=True)
    )


def _left_behind(what: str) -> CaptureError:
    return CaptureError(
        Reason(
            "side-effect",
            f"the function {what}, which happens at capture only",
            "aot.function",
            way_out='torch.compile(backend="retrograd"), which sees it',
        )
    )


def _referred(fn: Any) -> Iterator[Any]:
    """Objects that `fn` refers to by name, whose tensors it may use."""
    while isinstance(fn, functools.partial):
        yield from (*fn.args, *fn.keywords.values())
        fn = fn.func
    yield fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            yield None
    names = fn.__globals__
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, (nn.Module, torch.Tensor, list, dict, set, *_SCALARS)):
            yield value
    yield from fn.__defaults__ or ()
