"""Whether user code that a backward calls may differentiate through the graph of that backward.

In: hooks, and contexts of Functions. Out: which of their code, or of the functions that it calls by a name,
asks autograd for gradients. What torch defines only hands on what the user gave it.

The engine tells of hooks when it has released the graph, which is too late for those that ask. So hooks are
noted when they are registered, and looked at when the next backward begins.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from retrograd.closures import closed_over, codes_in, is_defined_here

#: so many values are looked at for each hook: who can reach more is taken to ask for gradients. Longer
#: containers are not.
MOST_VALUES, MOST_ITEMS = 1000, 100

Hooks = OrderedDict[int, Callable[..., Any]]

#: by identity, dictionaries of hooks: those that nobody has looked at, and those with a hook that asks.
_registered: dict[int, weakref.ref[Hooks]] = {}


def note(hooks: Hooks) -> None:
    """A hook has been registered in `hooks`, which belong to a tensor or a node."""
    key = id(hooks)
    _registered[key] = weakref.ref(hooks, lambda _: _registered.pop(key, None))


def is_one_registered() -> bool:
    """Whether a hook that may ask for gradients is registered anywhere. Forgets those that do not."""
    found = [(key, ref, ref()) for key, ref in list(_registered.items())]
    if not found:
        return False
    asks_none = not who_asks(hook for _, _, hooks in found if hooks for hook in list(hooks.values()))
    for key, ref, hooks in found:
        if _registered.get(key) is ref and (asks_none or not hooks or not who_asks(list(hooks.values()))):
            _registered.pop(key, None)  # it may be gone meanwhile
    return bool(_registered)


def who_asks(hooks: Iterable[Any]) -> set[types.CodeType]:
    """The code behind `hooks` that may ask for gradients; of what is too much to read, this function's."""
    pending, seen, asking = list(hooks), set[int](), set[types.CodeType]()
    most = MOST_VALUES * max(len(pending), 1)
    while pending:
        one = pending.pop()
        if isinstance(one, _CALL_NOTHING) or id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > most:
            return {*asking, who_asks.__code__}
        if isinstance(one, types.FunctionType) and not is_defined_here(one) and _names_autograd(one.__code__):
            asking.add(one.__code__)
        pending += _leads_to(one)
    return asking


#: values whose own code is torch's, or that have none.
_CALL_NOTHING = (torch.Tensor, nn.Module, types.ModuleType, type, str, bytes, int, float, complex, type(None))


def is_context(one: Any) -> bool:
    """Whether it is the context of a Function, not a hook."""
    return hasattr(type(one), "_forward_cls")


def _leads_to(one: Any) -> Iterator[Any]:
    if isinstance(one, types.FunctionType):
        yield from closed_over(one).values()
        if not is_defined_here(one):
            named = (one.__globals__.get(name) for name in one.__code__.co_names)
            yield from (value for value in named if isinstance(value, types.FunctionType))
    elif isinstance(one, types.MethodType):
        yield one.__func__
    elif isinstance(one, functools.partial):
        yield one.func
    elif isinstance(one, (dict, list, tuple)):
        values = one.values() if isinstance(one, dict) else one
        yield from values if len(one) <= MOST_ITEMS else ()
    elif isinstance(one, BackwardHook):
        yield from (*one.user_hooks, *one.user_pre_hooks)
    elif is_context(one):
        yield type(one)._forward_cls.backward
    elif isinstance(call := vars(type(one)).get("__call__"), types.FunctionType):
        yield call


@functools.lru_cache(4096)
def _names_autograd(code: types.CodeType) -> bool:
    return any(map(_names_it_itself, codes_in(code)))


def _names_it_itself(code: types.CodeType) -> bool:
    if "backward" in code.co_names or {"autograd", "grad"}.issubset(code.co_names):
        return True
    return "grad" in code.co_names and any(
        step.opname == "LOAD_GLOBAL" and step.argval == "grad" for step in dis.get_instructions(code)
    )
