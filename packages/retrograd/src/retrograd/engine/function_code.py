"""Decides from its code whether an ``autograd.Function`` is pure: equal arguments give equal results.

In: the class. Out: a `PurityAnalysis`: the side effects of its methods, and the user functions that they call
by a global name. A method may use its arguments, torch, ``math``, harmless builtins, and functions that are
pure themselves; a backward may not mutate anything.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import math
import operator
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.closures import closed_over, codes_in

Step = dis.Instruction

_METHODS = ("forward", "setup_context", "backward")

#: The builtins that every function may use: none depends on or changes anything but its arguments.
_HARMLESS = (
    "abs all any bool complex dict divmod enumerate float getattr hasattr int isinstance len list max min "
    "pow range reversed round slice sorted sum tuple type zip "
    "AssertionError NotImplementedError RuntimeError TypeError ValueError"
)
_BUILTINS = frozenset(vars(builtins)[name] for name in _HARMLESS.split())

_MODULES = (math, operator)

#: Names of streams, events, futures and their methods. They launch no operator.
_ASYNCHRONOUS = (
    "Event Future Stream StreamContext collect_all current_stream default_stream fork get_future "
    "record_event record_stream set_stream stream synchronize wait wait_all wait_event wait_stream"
)

#: Attributes of a context, a tensor or torch whose use a graph cannot represent, each with the reason.
_ATTRIBUTES: Mapping[str, str] = {
    "mark_dirty": "it changes its inputs in place",
    "item": "it reads values",
    "tolist": "it reads values",
    "numpy": "it reads values",
    "data_ptr": "it asks for addresses",
    "register_hook": "it registers hooks",
    "is_compiling": "it asks whether it is compiled",
    "is_dynamo_compiling": "it asks whether it is compiled",
    "data": "it goes around autograd by .data",
    **dict.fromkeys(_ASYNCHRONOUS.split(), "it waits for what runs elsewhere, or switches streams"),
}

_STORES = {
    "STORE_GLOBAL": "changes a global",
    "DELETE_GLOBAL": "changes a global",
    "STORE_DEREF": "changes a variable of an outer function",
    "IMPORT_NAME": "imports",
    "YIELD_VALUE": "is a generator",
}

#: Methods that mutate a container. A method may call them on a container that it made itself.
_FILLS = frozenset({"append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault"})

_CHANGES = ("STORE_ATTR", "DELETE_ATTR", "DELETE_SUBSCR")

_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CODE = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)


@dataclass
class PurityAnalysis:
    """What we found in the code of a Function.

    Attributes:
        reason: why the Function is not pure; None if it is.
        helpers: what it calls by a global name, which may be rebound: namespace, name, value.
        seen: the functions that were read.
    """

    reason: str | None = None
    helpers: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)

    @classmethod
    def of(cls, function: Any) -> PurityAnalysis:
        """Analyse the methods of a Function."""
        reading = cls()
        reading.reason = _why_not_repeatable(function, reading)
        return reading

    def still_holds(self) -> bool:
        """Whether the global names are still bound to the functions that were read."""
        return all(names.get(name) is value for names, name, value in self.helpers)


def why_backward_has_effects(function: Any) -> str | None:
    """The first lasting side effect of a Function's backward, apart from changes to tensors and its context;
    None if its code shows none."""
    written = _written_backward(function)
    return next(
        filter(None, (_Effects(method, PurityAnalysis(), True).why_not() for method in written)), None
    )


def writes_in_place(hook: Any, depth: int = 4) -> bool:
    """Whether a hook's code, or that of a function it closes over, may change a tensor in place: it is or
    uses a method whose name ends in ``_``, or it stores into something."""
    hook = getattr(hook, "func", hook)
    if isinstance(hook, types.CodeType):
        return any(map(_code_writes_in_place, codes_in(hook)))
    if not callable(hook) or not depth:
        return False
    written = hook if hasattr(hook, "__code__") else type(hook).__call__
    written = getattr(written, "__func__", written)
    if not isinstance(written, types.FunctionType):
        return _changes_in_place(getattr(hook, "__name__", ""))
    return any(writes_in_place(one, depth - 1) for one in (written.__code__, *closed_over(written).values()))


@functools.lru_cache(4096)
def _code_writes_in_place(code: types.CodeType) -> bool:
    return any(
        _stores_into(step) or (step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _changes_in_place(step.argval))
        for step in dis.get_instructions(code)
    )


def _stores_into(step: Step) -> bool:
    """Whether an instruction mutates an object: it stores elements, or is an ``+=`` or the like."""
    is_sum = step.opname == "BINARY_OP" and step.argrepr[-1:] == "="
    return is_sum or step.opname in ("STORE_SUBSCR", "STORE_SLICE")


def _changes_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def reads_saved_tensors(function: Any) -> bool | None:
    """Whether the backward of a Function reads ``saved_tensors``; None if its code does not tell, because it
    passes its context to other code."""
    codes = [method.__code__ for method in _written_backward(function)]
    if any("saved_tensors" in code.co_names for code in codes):
        return True
    return None if not codes or any(map(_hands_context_on, codes)) else False


def _hands_context_on(code: types.CodeType) -> bool:
    """Whether the first parameter is used for anything but attribute access."""
    context = next(iter(code.co_varnames), None)
    return any(
        context in (one.argval if isinstance(one.argval, tuple) else (one.argval,))
        for one, following in itertools.pairwise(dis.get_instructions(code))
        if "_ATTR" not in following.opname and following.opname != "LOAD_METHOD"
    )


def _written_backward(function: Any) -> Iterator[types.FunctionType]:
    """The Python functions that make up a Function's backward, without torch's decorators."""
    return (method for method in _unwrapped(function.backward) if not _is_in_torch(method))


def methods_of(function: Any) -> Iterator[types.FunctionType]:
    """The Python functions that a Function defines, including those under decorators."""
    for name in _METHODS:
        yield from _unwrapped(getattr(function, name))


def _unwrapped(method: Any) -> Iterator[types.FunctionType]:
    while method is not None:
        method = getattr(method, "__func__", method)
        if isinstance(method, types.FunctionType) and not _is_torchs(method):
            yield method
        method = getattr(method, "__wrapped__", None)


def _why_not_repeatable(function: Any, reading: PurityAnalysis) -> str | None:
    for name in _METHODS:
        for method in _unwrapped(getattr(function, name)):
            reason = _Reader(method, reading, is_backward=name == "backward").why_not()
            if reason is not None:
                return reason
    return None


class _Reader:
    """Reads the code of one function.

    Args:
        function: the function whose code is read.
        reading: collects the functions that the code calls.
        is_backward: whether the function runs in a backward, where it may not mutate anything.
    """

    _stores = frozenset(_STORES)

    def __init__(self, function: types.FunctionType, reading: PurityAnalysis, is_backward: bool) -> None:
        self._function, self._reading, self._is_backward = function, reading, is_backward
        self._name = function.__name__
        self._cells = closed_over(function)

    def why_not(self) -> str | None:
        """Why the function is not pure; None if it is."""
        if (self._function, self._is_backward) in self._reading.seen:
            return None
        self._reading.seen.add((self._function, self._is_backward))
        return next(filter(None, map(self._why_not_code, codes_in(self._function.__code__))), None)

    def _why_not_code(self, code: types.CodeType) -> str | None:
        own = {*code.co_cellvars, *code.co_varnames}
        steps = list(dis.get_instructions(code))
        added_to = None  # the object loaded before a COPY: ``ctx`` in ``ctx.calls += 1``
        for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
            added_to = before if step.opname == "COPY" else added_to
            loaded = added_to if before is not None and before.opname == "SWAP" else before
            if (reason := self._why_not_step(loaded, step, after, own)) is not None:
                return reason
        return None

    def _why_not_step(self, before: Step | None, step: Step, after: Step | None, own: set[str]) -> str | None:
        name = step.opname
        is_applied = after is not None and after.argval == "apply"
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self._why_not_global(step.argval, is_applied)
        if name.startswith("LOAD_") and step.argval in self._cells and step.argval not in own:
            return self._why_not_value(step.argval, self._cells[step.argval], is_applied)
        if name == "STORE_DEREF" and step.argval in own:
            return None
        if name in self._stores:
            return f"its {self._name} {_STORES[name]}"
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            is_local = before is not None and before.opname.startswith("LOAD_FAST")
            return self._why_not_attribute(step.argval, is_local)
        if name == "STORE_ATTR" and not self._is_context(before):
            return f"its {self._name} sets attributes"
        return self._why_not_change(step) if self._is_backward else None

    def _is_context(self, load: Step | None) -> bool:
        """Whether `load` loads the Function's context, by torch's convention the first argument."""
        first = self._function.__code__.co_varnames[:1]
        loaded = load.argval if load is not None and load.opname.startswith("LOAD_FAST") else None
        return (loaded[-1:] if isinstance(loaded, tuple) else (loaded,)) == first

    def _why_not_change(self, step: Step) -> str | None:
        is_change = _stores_into(step) or step.opname in _CHANGES
        return "its backward changes something in place" if is_change else None

    def _why_not_attribute(self, name: str, is_local: bool) -> str | None:
        if self._is_backward and name in _FILLS and not is_local:
            return "its backward changes a container"
        if self._is_backward and _changes_in_place(name):
            return "its backward changes something in place"
        return _ATTRIBUTES.get(name)

    def _why_not_global(self, name: str, is_applied: bool) -> str | None:
        names = self._function.__globals__
        value = names.get(name, vars(builtins).get(name, self))
        if name in names and not isinstance(value, types.ModuleType) and not _is_torchs(value):
            self._reading.helpers.append((names, name, value))
        return self._why_not_value(name, value, is_applied)

    def _why_not_value(self, name: str, value: Any, is_applied: bool) -> str | None:
        if isinstance(value, types.ModuleType):
            known = value in _MODULES or value.__name__.partition(".")[0] == "torch"
            return None if known else f"its {self._name} uses the module {value.__name__}"
        if _is_torchs(value) or _is_harmless(value):
            return _ATTRIBUTES.get(getattr(value, "__name__", ""))
        if isinstance(value, types.FunctionType):
            return _Reader(value, self._reading, self._is_backward).why_not()
        if is_applied and isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return _why_not_repeatable(value, self._reading)
        return f"its {self._name} reads {name} when it runs"


class _Effects(_Reader):
    """Looks only for lasting side effects in the code: not for what it reads, nor for mutated tensors."""

    _stores = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF"})

    def _why_not_change(self, step: Step) -> str | None:
        return None

    def _why_not_attribute(self, name: str, is_local: bool) -> str | None:
        return "its backward changes a container" if name in _FILLS and not is_local else None

    def _why_not_value(self, name: str, value: Any, is_applied: bool) -> str | None:
        is_users = isinstance(value, types.FunctionType) and not _is_torchs(value)
        return _Effects(value, self._reading, True).why_not() if is_users else None


def _is_torchs(value: Any) -> bool:
    """Whether `value` is a function or class from torch, or a constant like ``torch.float32``."""
    module = getattr(value, "__module__", None)
    is_torchs = isinstance(module, str) and module.partition(".")[0] == "torch"
    return isinstance(value, _VALUES) or (is_torchs and isinstance(value, _CODE))


def _is_in_torch(function: types.FunctionType) -> bool:
    """Whether torch defines the function. We check its globals: torch's decorators copy ``__module__``."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def _is_harmless(value: Any) -> bool:
    try:
        return value in _BUILTINS
    except TypeError:  # not hashable
        return False
