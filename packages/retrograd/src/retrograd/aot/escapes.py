"""Tensors of a capture that outlive it: in a cache, a closure, a global variable or an attribute of a class.

In: a function and its modules. Out: a context in which it is captured. What has come to hold a tensor there
holds again what it held before, and the capture is refused: eager would have put a tensor with numbers there,
and a tensor of a trace raises wherever it is used next.

Looked at is what the code of the function, and of ``forward`` of its modules, names: variables of its
closure, global variables, what these hold and other functions that they are. What torch defines is not.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograd._torch.trace import FirstRun
from retrograd.closures import cells_of, closed_over, codes_in, is_defined_here
from retrograd.errors import CaptureError, Refusal

#: so many places are looked at, and longer containers are not.
MOST_HOLDERS, MOST_ITEMS = 1000, 100

#: attributes that every module has.
OF_ALL_MODULES = frozenset(vars(nn.Module()))
#: recurrent layers gather their weights anew when these are other ones.
_OF_TORCH = OF_ALL_MODULES | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names"}


class _Holder(NamedTuple):
    """What has names for values: `read` gives them, `put` and `drop` change one."""

    name: str
    read: Callable[[], Mapping[Any, Any]]
    put: Callable[[Any, Any], None]
    drop: Callable[[Any], None]


@contextmanager
def no_tensor_escapes(
    fn: Callable[..., Any], roots: Sequence[nn.Module], first: FirstRun | None
) -> Iterator[None]:
    """Inside, `fn` runs, followed by `first`. If that run counts, what was kept is real afterwards.

    Raises:
        CaptureError: a tensor of the capture was kept.
    """
    reached = _Reached()
    for one in (fn, *(module for root in roots for module in root.modules())):
        reached.add(one)
    noted = [(holder, dict(holder.read())) for holder in reached.holders]
    lists = [(one, list(one)) for one in reached.lists]
    filled = [cache.cache_info().currsize for cache in reached.caches]
    kept: list[str] = []
    try:
        yield
    finally:
        real = _real_after(first) if first is not None and first.can_be_finished else None
        for holder, before in noted:
            kept += _restore(holder, before, real)
        for one, values in lists:
            if _holds_new(one, values):
                one[:] = values if real is None else real(one)
                kept.append("a list")
        for cache, size in zip(reached.caches, filled, strict=True):
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # it is filled again with tensors that have numbers
    if kept:
        raise CaptureError.because(
            "side-effect",
            f"the function keeps a tensor in {kept[0]}, which would happen at capture only",
            "aot.function",
            way_out='torch.compile(backend="retrograd"), which sees it',
        )


def _real_after(first: FirstRun) -> Callable[[Any], Any]:
    """Gives real tensors in place of the trace's, which ends there."""

    def real(value: Any) -> Any:
        first.go_on_eagerly(Refusal("side-effect", "the function keeps a tensor"))
        return first.real(value)

    return real


def _restore(holder: _Holder, before: Mapping[Any, Any], real: Callable[[Any], Any] | None) -> Iterator[str]:
    """Put back what holds a tensor now that it did not hold before; or, by `real`, a real one there."""
    for key, value in dict(holder.read()).items():
        if value is before.get(key, _ASIDE) or not _holds_tensor(value):
            continue
        yield f"{key} of {holder.name}"
        if real is not None:
            holder.put(key, real(value))
        elif key in before:
            holder.put(key, before[key])
        else:
            holder.drop(key)


_ASIDE = object()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set)):
        return len(value) <= MOST_ITEMS and any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _holds_new(values: list[Any], before: list[Any]) -> bool:
    known = {id(value) for value in before}
    return any(id(value) not in known and _holds_tensor(value) for value in values)


class _Reached:
    """What a function can reach by the names in its code."""

    def __init__(self) -> None:
        self.holders: list[_Holder] = []
        self.lists: list[list[Any]] = []
        self.caches: list[Any] = []
        self._seen: dict[int, Any] = {}

    def add(self, value: Any) -> None:
        """`value`, and what it leads to."""
        pending = [value]
        while pending and len(self.holders) < MOST_HOLDERS:
            one = pending.pop()
            if id(one) not in self._seen:
                self._seen[id(one)] = one
                with suppress(Exception):  # a class may answer anything
                    pending += self._look_at(one)

    def _look_at(self, one: Any) -> Iterator[Any]:
        if isinstance(one, (torch.Tensor, types.ModuleType)):
            return
        if is_defined_here(one) and not isinstance(one, nn.Module):
            return
        if isinstance(one, functools.partial):
            yield from (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, types.MethodType):
            yield from (one.__func__, one.__self__)
        elif isinstance(one, types.FunctionType):
            yield from self._function(one)
        elif hasattr(one, "cache_clear") and hasattr(one, "cache_info"):  # as of ``functools.cache``
            self.caches.append(one)
            yield one.__wrapped__
        elif isinstance(one, type):
            yield from self._holder(_Holder(one.__name__, lambda: _public(one), *_setters(one)))
        elif isinstance(one, list):
            self.lists.append(one)
            yield from one if len(one) <= MOST_ITEMS else ()
        elif isinstance(one, dict):
            yield from self._holder(_Holder("a dictionary", lambda: one, one.__setitem__, one.__delitem__))
        elif isinstance(one, nn.Module):  # of public attributes more is asked, see `ModuleState.unchanged`
            own = vars(one)
            yield from self._holder(
                _Holder(
                    f"a {type(one).__name__}",
                    lambda: {name: own[name] for name in own if name[:1] == "_" and name not in _OF_TORCH},
                    own.__setitem__,
                    own.__delitem__,
                )
            )
            yield from (type(one), type(one).forward)
        elif hasattr(one, "__dict__"):
            values = vars(one)
            name = f"a {type(one).__name__}"
            yield from self._holder(_Holder(name, lambda: values, values.__setitem__, values.__delitem__))
            yield type(one)

    def _holder(self, holder: _Holder) -> Iterator[Any]:
        self.holders.append(holder)
        values = holder.read()
        yield from values.values() if len(values) <= MOST_ITEMS else ()

    def _function(self, fn: types.FunctionType) -> Iterator[Any]:
        cells = cells_of(fn)
        yield from self._holder(
            _Holder(
                "the closure",
                lambda: {k: v for k, v in closed_over(fn).items() if not isinstance(v, types.CellType)},
                lambda name, value: setattr(cells[name], "cell_contents", value),
                lambda name: delattr(cells[name], "cell_contents"),
            )
        )
        names, values = {name for code in codes_in(fn.__code__) for name in code.co_names}, fn.__globals__
        yield from self._holder(
            _Holder(
                "the global variables",
                lambda: {name: values[name] for name in names if name in values},
                values.__setitem__,
                values.__delitem__,
            )
        )
        own = vars(fn)
        yield from self._holder(_Holder(fn.__name__, lambda: own, own.__setitem__, own.__delitem__))


def _setters(one: type) -> tuple[Callable[[Any, Any], None], Callable[[Any], None]]:
    return functools.partial(setattr, one), functools.partial(delattr, one)


def _public(one: type) -> dict[str, Any]:
    return {name: value for name, value in vars(one).items() if name[:2] != "__"}
