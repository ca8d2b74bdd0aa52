"""What a step can reach besides its arguments: objects, what they hold, and whether it is still the same.

In: a function. Out: `Reached`: its tensors with names, which of Python's containers a run has changed, how
they were, and `Snapshot`s, which say whether what a capture can have read is as it was.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch

from retrograd.step.snapshot import MOST_PARTS, SCALARS, Snapshot, are_same, called, is_same, parts_of

__all__ = ["Reached", "TooMuchError"]

#: how many objects are looked at.
_MOST_OBJECTS = 300_000
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")
_OPAQUE = (ModuleType, CodeType, torch.Generator, torch.Size)


class TooMuchError(Exception):
    """The step reaches more objects than can be looked at before every call."""


@dataclass(eq=False)
class _Held:
    """One container as it was: `parts` in order, and for dictionaries their `keys`."""

    container: Any
    path: str
    parts: tuple[Any, ...]
    keys: tuple[Any, ...] = ()
    is_namespace: bool = False

    def is_same(self) -> bool:
        container = self.container
        return are_same(parts_of(container), self.parts) and (
            not isinstance(container, Mapping) or are_same(tuple(container), self.keys)
        )

    def restore(self) -> None:
        if self.is_same():
            return
        if isinstance(self.container, dict):
            self.container.clear()
            self.container.update(zip(self.keys, self.parts, strict=True))
        elif isinstance(self.container, list):
            self.container[:] = self.parts
        elif isinstance(self.container, (set, deque)):
            self.container.clear()
            (self.container.update if isinstance(self.container, set) else self.container.extend)(self.parts)

    def change(self) -> str:
        """Where it differs, in words."""
        if isinstance(self.container, Mapping):
            now = dict(self.container)
            before = dict(zip(map(id, self.keys), self.parts, strict=True))
            for key, value in now.items():
                if id(key) not in before or not is_same(before[id(key)], value):
                    return f"{self.path}.{key}" if self.is_namespace else f"{self.path}[{_short(key)}]"
        return self.path


@dataclass(eq=False)
class _Named:
    """Names of a namespace, as they were: globals that functions read, cells of closures."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    path: str
    value: Any


class Reached:
    """Everything that `fn` reaches, as it is now.

    Args:
        fn: the function. also: more objects to begin with. passing: arguments of one call, of which snapshots
            know nothing.

    Attributes:
        tensors: by id, each tensor with the path on which it was found. own: ids of those that were not
            passed.
        iterators: paths of iterators that code of `fn` may advance. wrappers: paths of modules that
            communicate between processes in the backward, out of sight.
        groups: the parameter groups of optimizers, with their paths.

    Raises:
        TooMuchError: there is too much of it.
    """

    def __init__(self, fn: Any, also: Sequence[Any] = (), passing: Sequence[Any] = ()) -> None:
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.iterators: list[str] = []
        self.wrappers: list[str] = []
        self.groups: list[tuple[dict[str, Any], str]] = []
        self._held: list[_Held] = []
        self._named: list[_Named] = []
        self._seen: dict[Any, Any] = {}
        self._waiting: list[tuple[Any, str]] = [(value, "argument") for value in also]
        self._waiting.append((fn, getattr(fn, "__name__", type(fn).__name__)))
        self._visit_all()
        self.own = frozenset(self.tensors)
        self._lasting = len(self._held), len(self._named)
        self._waiting += [(value, "argument") for value in passing]
        self._visit_all()

    def _visit_all(self) -> None:
        while self._waiting:
            self._visit(*self._waiting.pop())
            if len(self._seen) > _MOST_OBJECTS:
                raise TooMuchError(f"it reaches more than {_MOST_OBJECTS} objects")

    def changes(self) -> list[str]:
        """Paths of what is no longer as it was, tensors' values aside."""
        changed = [held.change() for held in self._held if not held.is_same()]
        return changed + [named.path for named in self._named if not is_same(_read(named), named.value)]

    def restore(self) -> None:
        """Make all containers, globals and cells what they were."""
        for held in self._held:
            held.restore()
        for named in self._named:
            if not is_same(_read(named), named.value):
                named.write(named.value)

    def snapshot(self, names: frozenset[str] | None, apart: frozenset[tuple[int, str]]) -> Snapshot:
        """What a run can have read.

        Args:
            names: that the code which ran speaks of; None if that is not known. apart: by id of a dictionary,
                keys that are inputs.
        """
        made = Snapshot(names)
        for held in self._held[: self._lasting[0]]:
            if held.is_namespace or any(id(held.container) == place for place, _ in apart):
                keys = [k for k in held.keys if (names is None or k in names or not held.is_namespace)]
                made.names(held.container, [k for k in keys if (id(held.container), k) not in apart])
            else:
                made.whole(held.container)
        for named in self._named[: self._lasting[1]]:
            made.value(named.read, named.value)
        return made

    def _add(self, container: Any, path: str, is_namespace: bool = False) -> None:
        """Note a container and go on with what it holds."""
        parts = parts_of(container)
        keys = tuple(container) if isinstance(container, Mapping) else ()
        self._held.append(_Held(container, path, parts, keys, is_namespace))
        if len(parts) > MOST_PARTS:
            return
        for place, value in enumerate(parts):
            if type(value) in SCALARS:
                continue
            if keys and isinstance(keys[place], str):
                self._waiting.append(
                    (value, f"{path}.{keys[place]}" if is_namespace else f"{path}[{keys[place]!r}]")
                )
            else:
                self._waiting.append((value, f"{path}[{place}]"))
        for key in keys:
            if type(key) not in SCALARS:
                self._waiting.append((key, f"a key of {path}"))

    def _visit(self, value: Any, path: str) -> None:
        if type(value) in SCALARS or isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path)
        elif isinstance(value, FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, MethodType):
            self._waiting += [(value.__self__, f"{path}.__self__"), (value.__func__, path)]
        elif isinstance(value, functools.partial):
            self._waiting.append((value.func, path))
            self._waiting += [
                (part, f"an argument of {path}") for part in (*value.args, *value.keywords.values())
            ]
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque, MappingProxyType)):
            self._add(value, path)
        elif isinstance(value, type):
            if _is_users(value.__module__):
                self._add(vars(value), path, is_namespace=True)
        elif isinstance(value, (staticmethod, classmethod)):
            self._waiting.append((value.__func__, path))
        elif isinstance(value, property):
            self._waiting += [(part, path) for part in (value.fget, value.fset) if part is not None]
        else:
            self._visit_object(value, path)

    def _visit_tensor(self, tensor: torch.Tensor, path: str) -> None:
        self.tensors[id(tensor)] = (tensor, path)
        for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
            if hooks:
                self._waiting.append((hooks, f"hooks of {path}"))
        if tensor.__dict__:
            self._add(tensor.__dict__, path, is_namespace=True)

    def _visit_object(self, value: Any, path: str) -> None:
        if type(value).__module__.split(".")[0] == "retrograd":
            return
        if isinstance(value, torch.optim.Optimizer):
            self.groups += [
                (group, f"{path}.param_groups[{i}]") for i, group in enumerate(value.param_groups)
            ]
        if isinstance(value, torch.nn.Module) and type(value).__module__.startswith(_WRAPPERS):
            self.wrappers.append(path)
        if hasattr(type(value), "__next__"):
            self.iterators.append(path)
        for cls in type(value).__mro__:
            self._waiting.append((cls, cls.__name__))
            for name in cls.__dict__.get("__slots__", ()) if _is_users(cls.__module__) else ():
                if isinstance(name, str) and hasattr(value, name):
                    self._name(value, name, f"{path}.{name}")
        if isinstance(getattr(value, "__dict__", None), dict):
            self._add(value.__dict__, path, is_namespace=True)

    def _name(self, owner: Any, name: str, path: str) -> None:
        value = getattr(owner, name)
        self._named.append(
            _Named(lambda: getattr(owner, name), lambda old: setattr(owner, name, old), path, value)
        )
        self._waiting.append((value, path))

    def _visit_function(self, fn: FunctionType, path: str) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._visit_cell(cell, name)
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._waiting.append((value, f"a default of {path}"))
        if (wrapped := fn.__dict__.get("__wrapped__")) is not None:
            self._waiting.append((wrapped, path))
        if not _is_users(fn.__globals__.get("__name__") or "?"):
            return
        for name in _names_of(fn.__code__):
            if name in fn.__globals__:
                self._visit_global(fn.__globals__, name, name, fn.__code__)

    def _visit_cell(self, cell: Any, name: str) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return
        self._named.append(
            _Named(lambda: cell.cell_contents, functools.partial(setattr, cell, "cell_contents"), name, value)
        )
        self._waiting.append((value, name))

    def _visit_global(self, names: dict[str, Any], name: str, path: str, code: CodeType) -> None:
        value = names[name]
        if (id(names), name) in self._seen:
            return
        self._seen[(id(names), name)] = None
        self._named.append(
            _Named(lambda: names.get(name), functools.partial(names.__setitem__, name), path, value)
        )
        if isinstance(value, ModuleType):
            if _is_users(value.__name__):
                for inner in _names_of(code):
                    if inner in vars(value):
                        self._visit_global(vars(value), inner, f"{path}.{inner}", code)
            return
        self._waiting.append((value, path))


def _read(named: _Named) -> Any:
    return called(named.read)


def _short(key: Any) -> str:
    return repr(key) if type(key) in SCALARS else f"a {type(key).__name__}"


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _is_users(module: str) -> bool:
    root = module.split(".")[0]
    return root not in ("torch", "retrograd", "builtins", "numpy") and (
        root == "__main__" or root not in sys.stdlib_module_names
    )
