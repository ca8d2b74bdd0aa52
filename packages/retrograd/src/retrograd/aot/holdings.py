"""What objects hold, at every depth, to detect changes.

In: modules and objects among the arguments of a call. Out: `Holdings`, which says whether any of them holds
something else now: attributes, also those in ``__slots__``; contents of short containers and small arrays;
and the same of objects that it holds. We look neither into functions and classes, nor into objects of other
packages, such as loggers and optimizers, which change by themselves.
"""

from __future__ import annotations

import copyreg
import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from retrograd.aot.tracer_leaks import MOST_HOLDERS, MOST_ITEMS, OF_ALL_MODULES
from retrograd.graph.structure import PLAIN_VALUES, is_same

#: classes whose attributes say nothing of what a function computes, or are compared elsewhere.
_KNOWN = (torch.Tensor, type, BuiltinFunctionType, FunctionType, ModuleType)
#: packages, besides those of the arguments' own classes, that define containers and plain objects.
_OPEN = {"argparse", "array", "builtins", "collections", "functools", "numpy", "types"}
#: In their place, only what they contain is compared.
_CONTAINERS = (list, dict, tuple, set, frozenset)
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_ABSENT = object()

Read = Callable[[], Sequence[Any]]


class Holdings:
    """What `given` hold.

    Attributes:
        modules: the modules among and in them, without submodules.
    """

    def __init__(self, *given: Any) -> None:
        self.modules = list[nn.Module]()
        self._given, self._held = given, list[tuple[Read, Sequence[Any]]]()
        #: attributes, as flat lists, which are compared in one call each.
        self._owners, self._dicts = list[Any](), list[dict[str, Any]]()
        self._places, self._keys, self._values = list[dict[str, Any]](), list[str](), list[Any]()
        described: list[list[Any]] = []
        found = {id(one): place for place, one in enumerate(given)}
        pending, submodules = [*given], set[nn.Module]()
        packages = {*map(_package_of, given)}
        for one in pending:  # grows while it is read
            values: list[Any] = []
            if _is(one, nn.Module):
                values += one._modules.values()
                packages.add(_package_of(one))
                if one not in submodules:
                    self.modules.append(one)
                    submodules.update(one.modules())
            described.append(values)
            for read in _reads(one):
                self._held.append((read, now := read()))
                values += now
            own = _attributes_of(one)
            if own is not None and not _is(one, MethodType):
                is_module = _is(one, nn.Module)
                keys = [key for key in own if not is_module or key not in OF_ALL_MODULES]
                attributes = [own[key] for key in keys]
                self._owners.append(one)
                self._dicts.append(own)
                self._places += [own] * len(keys)
                self._keys += keys
                self._values += attributes
                values += [len(own), *keys, *attributes]
            if found[id(one)] < len(given) and _package_of(one) in _OPEN:  # it only holds what is given
                packages.update(map(_package_of, values))
            for value in values:
                is_open = _package_of(value) in packages | _OPEN and len(found) < MOST_HOLDERS
                is_open = _is(value, nn.Module) or (is_open and _holds(value))
                if is_open and id(value) not in found:
                    found[id(value)] = len(pending)
                    pending.append(value)
        self._alive = pending  # so that no other object gets the identity of one of them
        self._lengths = [*map(len, self._dicts)]
        #: by object, its values; in place of containers that we look into, their classes and numbers.
        self._described = [
            [(type(v), found[id(v)]) if type(v) in _CONTAINERS and id(v) in found else v for v in values]
            for values in described
        ]

    def are_same(self) -> bool:
        """Whether all objects hold the same: equal values, in equal containers. Another object, such as
        another module, is the same only if its class has an ``__eq__`` that says so."""
        if (
            all(map(operator.is_, map(dict.get, self._places, self._keys, repeat(_ABSENT)), self._values))
            and [*map(len, self._dicts)] == self._lengths
            and all(map(operator.is_, map(_attributes_of, self._owners), self._dicts))
            and all(
                len(now := read()) == len(then) and all(map(operator.is_, now, then))
                for read, then in self._held
            )
        ):
            return True
        new = Holdings(*self._given)
        if not is_same(self._described, new._described):
            return False
        vars(self).update(vars(new))
        return True


def has_attributes(value: Any) -> bool:
    """Whether a function that is given `value` may read attributes or contents of it that can change. NumPy's
    arrays are compared by value instead."""
    return type(value).__module__ != "numpy" and _holds(value)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether the class of `value` is derived from `kind`. ``__class__`` of a dead proxy raises."""
    return issubclass(type(value), kind)


def _attributes_of(one: Any) -> dict[str, Any] | None:
    """The attributes of an object; None if they are not in a dictionary that Python keeps for it."""
    try:
        found = object.__getattribute__(one, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict else None


def _holds(value: Any) -> bool:
    if type(value) in PLAIN_VALUES or _is(value, _KNOWN):
        return False
    return _attributes_of(value) is not None or next(_reads(value), None) is not None


def _package_of(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


def _reads(one: Any) -> Iterator[Read]:
    """Functions that read what `one` holds besides its attributes, each with few values. They call nothing
    that a subclass may have defined."""
    if _is(one, dict):
        kind: Any = OrderedDict if _is(one, OrderedDict) else dict
        if dict.__len__(one) <= MOST_ITEMS:
            yield lambda: [*kind.keys(one), *kind.values(one), getattr(one, "default_factory", None)]
    elif base := next((base for base in _SEQUENCES if _is(one, base)), None):
        if base.__len__(one) <= MOST_ITEMS:
            yield lambda: [*base.__iter__(one)]
    elif _is(one, functools.partial):
        yield lambda: [one.func, *one.args, one.keywords]
    elif _is(one, MethodType):
        yield lambda: [one.__self__]
        return
    with suppress(Exception):  # most objects have no memory to read
        if _memory_of(one).nbytes <= 8 * MOST_ITEMS:
            yield functools.partial(_same_bytes, one, [b""])
    if names := copyreg._slotnames(type(one)):  # type: ignore[attr-defined]
        yield lambda: [_slot(one, name) for name in names]


def _slot(one: Any, name: str) -> Any:
    try:
        return object.__getattribute__(one, name)
    except Exception:  # not set, or a property that raises
        return _ABSENT


def _memory_of(one: Any) -> memoryview:
    """The memory of an array. A view refuses dates, their bytes it does not."""
    is_date = type(one).__module__ == "numpy" and one.dtype.kind in "mM"
    return memoryview(one.tobytes() if is_date else one)


def _same_bytes(one: Any, known: list[bytes]) -> Sequence[Any]:
    """The bytes of an array: the same object as long as they are equal."""
    now = bytes(_memory_of(one))
    known[0] = known[0] if known[0] == now else now
    return [known[0]]
