"""Decides whether user code in a backward may differentiate through the graph of that backward.

In: hooks, and contexts of Functions. Out: which of their code, or of the functions that they name, asks
autograd for gradients. Functions that torch defines do not count; the user functions in their closures do.

The engine reports hooks after it has released the graph, which is too late for hooks that ask for gradients.
So we record each hook when it is registered, and inspect it when the next backward begins. A tensor's hook
concerns graphs that contain the tensor's node. For a hook on a node, torch does not say which node. It is
either a node that this thread had made by then, or one that accumulates into a leaf, whose hooks we can read.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from retrograd.closures import closed_over, codes_in, is_defined_here
from retrograd.engine import (
    EngineRequest,
    edge_of,
    hooks_on,
    leaf_of,
    nodes_below,
)
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.streams import next_sequence_number

#: We inspect this many values for each hook. If a hook reaches more, it counts as asking for gradients. We do
#: not inspect containers that are longer than this.
MOST_VALUES, MOST_ITEMS = 1000, 100

Hooks = OrderedDict[int, Callable[..., Any]]


@dataclass(eq=False)
class _Registered:
    """A dictionary of hooks.

    Attributes:
        hooks: the dictionary.
        leaf: the leaf that it belongs to; None if it belongs to a node.
        number: the node's sequence number; None if torch does not say which node it is.
        before: the node has a smaller sequence number than this, or accumulates into a leaf.
        asking: the size of the dictionary when a hook in it was found to ask for gradients; None before
            inspection.
    """

    hooks: weakref.ref[Hooks]
    leaf: weakref.ref[torch.Tensor] | None = None
    number: int | None = None
    before: int = -1
    asking: int | None = None


#: By identity: dictionaries that were not inspected yet, and those with a hook that asks for gradients.
_registered: dict[int, _Registered] = {}


@without_torch_functions
def note(hooks: Hooks, node: Any = None) -> None:
    """Record that a hook has been registered in `hooks`, whose hooks receive the gradient of `node`; None if
    they belong to a node itself."""
    key = id(hooks)
    one = _Registered(weakref.ref(hooks, lambda _: _registered.pop(key, None)))
    if node is None:
        one.before = next_sequence_number()
    elif (leaf := leaf_of(node)) is not None:
        one.leaf = weakref.ref(leaf)
    else:
        one.number = node._sequence_nr()
    _registered[key] = one


@without_torch_functions
def leaf_asks(leaf: torch.Tensor) -> bool:
    """Whether a hook of a leaf asks for gradients. If so, we record the leaf's hooks, even if they were
    registered before we began to record."""
    both: tuple[Any, Any] = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    found = [hooks for hooks in both if hooks]
    asking = [hooks for hooks in found if asks(list(hooks.values()))]
    for hooks in asking:
        note(hooks, edge_of(leaf)[0])
    return bool(asking)


def asks_in(request: EngineRequest) -> bool:
    """Whether a hook that may ask for gradients is registered in the graph of `request`, as far as the
    sequence numbers of its nodes tell. Forgets hooks that do not ask."""
    harmless: _Seen = {}
    asking = {key: one for key, one in list(_registered.items()) if _is_asking(key, one, harmless)}
    if not asking:
        return False
    numbers = {one.number for one in asking.values()}
    leaves = {id(one.leaf()) for one in asking.values() if one.leaf is not None}
    before = max(one.before for one in asking.values())
    of_leaf_nodes = {key for key, one in asking.items() if one.before >= 0 and not _is_of_module(one)}
    for node in nodes_below(map(edge_of, request.tensors)):
        number = node._sequence_nr()
        if number < before or number in numbers:
            return True
        leaf = leaf_of(node) if leaves or of_leaf_nodes else None
        if leaf is None:
            continue
        if id(leaf) in leaves or (of_leaf_nodes and any(id(on) in of_leaf_nodes for _, on in hooks_on(node))):
            return True
    return False


def _is_of_module(one: _Registered) -> bool:
    """Whether these are the hooks of modules, which torch never registers on leaves."""
    return all(map(is_defined_here, (one.hooks() or {}).values()))


def _is_asking(key: int, one: _Registered, harmless: _Seen) -> bool:
    hooks = one.hooks()
    if hooks and one.asking == len(hooks):
        return True
    if hooks and asks(list(hooks.values()), harmless):
        one.asking = len(hooks)
        return True
    if _registered.get(key) is one:
        _registered.pop(key, None)  # another thread may have removed it meanwhile
    return False


#: Values, by identity and by whether they are reached from a hook, but not from the context of a Function.
_Seen = dict[tuple[int, bool], Any]


def asks(hooks: Sequence[Any], harmless: _Seen | None = None) -> bool:
    """Whether code behind `hooks` may ask for gradients, as `who_asks` tells.

    Args:
        hooks: hooks, and contexts of Functions.
        harmless: values behind which there is no such code. We add to them if there is none here.
    """
    known: _Seen = {} if harmless is None else harmless
    seen: _Seen = {}
    if next(_asking(hooks, seen, known), None) is not None:
        return True
    known.update(seen)
    return False


def who_asks(hooks: Sequence[Any]) -> set[types.CodeType]:
    """The code behind `hooks` that may ask for gradients. Code that raises or reads files in a hook counts
    too: after its error, eager lets the graph be used again. If there is too much code to read, the result
    contains this function's own code."""
    return set(_asking(hooks, {}, {}))


def _asking(hooks: Sequence[Any], seen: _Seen, harmless: _Seen) -> Iterator[types.CodeType]:
    pending = [(one, True) for one in hooks]
    most = MOST_VALUES * max(len(pending), 1)
    while pending:
        one, is_of_hook = pending.pop()
        key = id(one), is_of_hook
        if isinstance(one, _CALL_NOTHING) or key in seen or key in harmless:
            continue
        seen[key] = one
        if len(seen) > most:
            yield who_asks.__code__
            return
        if isinstance(one, types.FunctionType) and not is_defined_here(one):
            code = one.__code__
            if _names_autograd(code) or (is_of_hook and _raises(code)):
                yield code
        is_of_hook &= not is_context(one)  # a Function that validates its inputs may raise
        pending += [(other, is_of_hook) for other in _leads_to(one)]


#: values without code, or whose own code is part of torch
_CALL_NOTHING = (torch.Tensor, nn.Module, types.ModuleType, type, str, bytes, int, float, complex, type(None))


def is_context(one: Any) -> bool:
    """Whether the value is the context of a Function instead of a hook."""
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


@functools.lru_cache(4096)
def _raises(code: types.CodeType) -> bool:
    steps = (step for each in codes_in(code) for step in dis.get_instructions(each))
    return any(step.opname == "RAISE_VARARGS" or step.argval in ("open", "load") for step in steps)


def _names_it_itself(code: types.CodeType) -> bool:
    if "backward" in code.co_names or {"autograd", "grad"}.issubset(code.co_names):
        return True
    return "grad" in code.co_names and any(
        step.opname == "LOAD_GLOBAL" and step.argval == "grad" for step in dis.get_instructions(code)
    )
