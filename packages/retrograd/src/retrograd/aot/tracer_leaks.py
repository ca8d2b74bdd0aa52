"""Detect Python side effects of a captured function, so that no traced tensor leaks out of the capture.

In: a function, and the modules and objects among its arguments. Out: a context in which to capture it. If an
attribute, variable or container has changed at the end, we refuse the capture, and replace the new values by
real ones or restore the old ones. (In eager every call would make the change, and a leaked traced tensor
raises wherever it is used next.)

We inspect every name that the code of the function, and of its modules' ``forward``, uses: closure variables,
global variables, their contents, and functions among them. We do not inspect what torch defines. Any change
to an argument counts. Elsewhere a change counts only if the new value holds a tensor.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograd.closures import codes_in, is_assigned, is_defined_here
from retrograd.errors import CaptureError
from retrograd.graph.structure import is_same
from retrograd.runtime import pytree
from retrograd.trace import FirstRun

#: how many holders we inspect besides those of the arguments, and the longest container that we inspect.
MOST_HOLDERS, MOST_ITEMS = 1000, 100

#: the attributes that every module has. `_STATE` are those with its tensors, submodules, and the names of
#: its non-persistent buffers.
OF_ALL_MODULES = frozenset(vars(nn.Module()))
_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
#: recurrent layers refresh these lists of their weights when a weight is replaced.
_OF_TORCH = OF_ALL_MODULES | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names"}
#: how many holders a module has.
_OF_EACH = 6
_ABSENT = object()


class _Holder(NamedTuple):
    """An object that maps names to values: `read` returns them all, and `put` sets one. If `given`, it is an
    argument, and any change counts."""

    name: str
    read: Callable[[], dict[Any, Any]]
    put: Callable[[Any, Any], None]
    given: bool = False


@contextmanager
def unchanged(
    fn: Callable[..., Any], modules: Sequence[nn.Module], leaves: Sequence[Any], first: FirstRun | None
) -> Iterator[None]:
    """The context in which `fn` is captured.

    If the capture fails, or we refuse it, every changed value is real afterwards if the run of `fn` could be
    finished eagerly. Otherwise we restore the old values.

    Args:
        fn: the captured function.
        modules: the modules in the call.
        leaves: the flat inputs; we inspect plain objects among them.
        first: follows the run of `fn`, if it may be finished eagerly.

    Raises:
        CaptureError: `fn` has a side effect.
    """
    reached = _Reached(fn, modules, leaves)
    recorded = [(holder, holder.read()) for holder in reached.holders]
    filled = [cache.cache_info().currsize for cache in reached.caches]
    changed: list[str] = []
    is_refused = True
    try:
        yield
        is_refused = False
    finally:
        found = [
            (holder, key, before.get(key, _ABSENT), now.get(key, _ABSENT))
            for holder, before in recorded
            for now in [holder.read()]
            for key in {**before, **now}
            if not is_same(before.get(key, _ABSENT), now.get(key, _ABSENT))
        ]
        counting = [one for one in found if one[0].given or _holds_tensor(one[3])]
        changed += [f"{key} of {holder.name}" for holder, key, *_ in counting]
        values = [now for *_, now in found]
        if found and (changed or is_refused):
            if first is not None and any(may_hide(now) for *_, now in counting if now is not _ABSENT):
                first.why_not = "what it has set may hide a tensor of the trace"
            real = None if first is None else first.finished(values)
            for (holder, key, before, _), now in zip(found, real or values, strict=True):
                holder.put(key, before if real is None else now)
        for cache, size in zip(reached.caches, filled, strict=True):
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # The capture has cached traced tensors; the next call caches real ones.
    if changed:
        raise CaptureError.because(
            "side-effect",
            f"the function sets {changed[0]}, which would happen at capture only",
            "aot.function",
            way_out='torch.compile(backend="retrograd"), which sees it',
        )


#: besides tensors and arrays, types whose values refer to no other objects.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
_PLAIN += (torch.SymInt, torch.SymFloat, torch.SymBool)  # type: ignore[assignment]


def may_hide(tree: Any) -> bool:
    """Whether a value may refer to tensors that we cannot find."""
    return not all(isinstance(x, _PLAIN) or hasattr(x, "__array__") for x in pytree.tree_leaves(tree))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


class _Reached:
    """The holders that a function can reach through the names in its code and through its arguments."""

    def __init__(self, fn: Callable[..., Any], modules: Sequence[nn.Module], leaves: Sequence[Any]) -> None:
        self.holders = [*_generators()]
        self.caches: list[Any] = []
        given = (*modules, *filter(_is_plain_object, leaves))
        self._given, most = {*map(id, given)}, MOST_HOLDERS + _OF_EACH * len(given)
        seen, pending = dict[int, Any](), [fn, *given]
        while pending:
            one = pending.pop()
            if id(one) not in seen and (id(one) in self._given or len(self.holders) < most):
                seen[id(one)] = one
                with suppress(Exception):  # A class may raise anything on attribute access.
                    pending += self._look_at(one)

    def _look_at(self, one: Any) -> Iterator[Any]:
        if isinstance(one, (torch.Tensor, types.ModuleType)):
            return
        if is_defined_here(one) and not isinstance(one, nn.Module):
            return
        given, name = id(one) in self._given, f"a {type(one).__name__}"
        if isinstance(one, functools.partial):
            yield from (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, types.MethodType):
            yield from (one.__func__, one.__self__)
        elif isinstance(one, types.FunctionType):
            names = {name for code in codes_in(one.__code__) for name in code.co_names}
            yield from self._inside("the global variables", one.__globals__, False, names.__contains__)
            yield from self._inside(one.__name__, vars(one))
            yield from one.__closure__ or ()
        elif hasattr(one, "cache_clear") and hasattr(one, "cache_info"):  # as of ``functools.cache``
            self.caches.append(one)
            yield one.__wrapped__
        elif isinstance(one, type):
            yield from self._inside(one.__name__, one, False, lambda key: key[:2] != "__")
        elif isinstance(one, types.CellType):
            yield from self._inside("the closure", one)
        elif isinstance(one, (dict, list, set)):
            yield from self._inside("a dictionary" if isinstance(one, dict) else name, one, given)
        elif isinstance(one, nn.Module):
            own = vars(one)
            yield from self._inside(name, own, given, lambda key: key[:1] != "_" or key[:2] == "__")
            yield from self._inside(name, own, False, lambda key: key[:1] == "_" and key not in _OF_TORCH)
            for held in _STATE:
                yield from self._inside(name, own[held], given)
            yield from (type(one), type(one).forward)
        elif hasattr(one, "__dict__"):
            yield from self._inside(name, vars(one), given)
            yield type(one)

    def _inside(
        self, name: str, one: Any, given: bool = False, keep: Callable[[Any], bool] = lambda _: True
    ) -> Sequence[Any]:
        """Add a holder for `one`, limited to names that `keep` accepts. Return its values, to be inspected
        next."""
        self.holders.append(_Holder(name, lambda: _read(one, keep), functools.partial(_put, one), given))
        values = [*one] if isinstance(one, (list, set)) else [*_read(one, keep).values()]
        if given:
            self._given |= {id(v) for v in values if type(v) in (list, dict, set) and len(v) <= MOST_ITEMS}
        return values if len(values) <= MOST_ITEMS else ()


def _generators() -> Iterator[_Holder]:
    """The state of Python's random generator and, if NumPy is imported, of NumPy's."""
    state, put = random.getstate, random.setstate
    yield _Holder("Python's random numbers", lambda: {"the state": state()}, lambda _, now: put(now), True)
    if (numpy := sys.modules.get("numpy")) is not None:
        get, set_ = numpy.random.get_state, numpy.random.set_state
        yield _Holder("NumPy's random numbers", lambda: {"the state": get()}, lambda _, now: set_(now), True)


def _read(one: Any, keep: Callable[[Any], bool]) -> dict[Any, Any]:
    """The contents of a dictionary, class, list, set or closure cell, by name."""
    if isinstance(one, types.CellType):
        return {"a variable": one.cell_contents} if is_assigned(one) else {}
    if isinstance(one, (list, set)):
        return {"an item": [*one]}
    return {k: v for k, v in (vars(one) if isinstance(one, type) else one).items() if keep(k)}


def _put(one: Any, key: Any, value: Any) -> None:
    """Set `key` of a holder to `value`, or delete it if `value` is `_ABSENT`."""
    if isinstance(one, (list, set)):
        one.clear()
        (one.extend if isinstance(one, list) else one.update)(value)
    elif isinstance(one, (type, types.CellType)):
        key = key if isinstance(one, type) else "cell_contents"
        delattr(one, key) if value is _ABSENT else setattr(one, key, value)
    elif value is _ABSENT:
        one.pop(key, None)
    else:
        one[key] = value


def _is_plain_object(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, nn.Module, type))
