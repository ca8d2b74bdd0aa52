"""Calls of operators that a trace has seen before are written from memory.

In: a call of an ATen operator while ``make_fx``'s mode traces. Out: what the mode would make of it: new nodes
of the graph with their example values, and fake results that stand for them.

A deep model makes the same calls in each layer, and the mode takes about a millisecond for one: it looks for
a decomposition, runs it, and asks for the sizes of each result. What comes out depends on the operator, on
the metadata of its tensors, and on its other arguments, so that it is noted at the first such call and copied
at the next. Nothing is noted where more could matter: symbolic sizes, random numbers, operators that write or
whose results depend on data, constants, and operators that are not torch's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    get_proxy_slot,
    set_original_aten_op,
    set_proxy_slot,
)
from torch.fx.node import map_aggregate

from retrograd._torch.fx import is_operator_overload, schema_of
from retrograd._torch.trace.fakes import Form, fake_of_form, form_of
from retrograd.errors import Refusal


def _unnotable() -> Refusal:
    return Refusal("unnotable", "more than can be noted would have to be")


@dataclass(frozen=True)
class _Reference:
    """In the arguments of a noted node: the node with this number, of the call's tensors and then its own."""

    number: int


@dataclass(frozen=True)
class _Value:
    """A fake tensor; `memory` is the number of the first of the call's tensors that has it, or a new one."""

    form: Form
    memory: int


@dataclass(frozen=True)
class _Node:
    """A node that a call made: its arguments, with a `_Reference` for each node, and its example value.

    Attributes:
        value: a `_Value`, None, or a tuple of them.
        meta: what else of its metadata is copied.
    """

    target: Any
    name: str | None
    args: Any
    kwargs: Any
    value: Any
    meta: dict[str, Any]


@dataclass(frozen=True)
class _Noted:
    """What one call made.

    Attributes:
        container: makes what the call returns of several results; None if it returns one.
        results: numbers of tensors, or None.
    """

    nodes: tuple[_Node, ...]
    container: Callable[..., Any] | None
    results: tuple[int | None, ...]


def remember_calls(mode: ProxyTorchDispatchMode) -> None:
    """Give the mode of a trace a memory. (Operators of higher order know torch's class of mode only.)"""
    memory = _Memory(mode)

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return memory.dispatch(func, types, args, kwargs or {})

    mode.__torch_dispatch__ = MethodType(dispatch, mode)  # type: ignore[method-assign]


class _Memory:
    """What the calls of one trace have made so far."""

    def __init__(self, mode: ProxyTorchDispatchMode) -> None:
        self._run, self._tracer = mode.__torch_dispatch__, mode.tracer
        self._marks_casts = getattr(mode, "emulate_precision_casts", False)
        self._known: dict[Hashable, _Noted | None] = {}

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Trace one call."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # functionalisation asks for it more often than for anything else
        tensors: list[FakeTensor] = []
        try:
            key = self._key(func, args, kwargs, tensors)
            known = self._known.get(key, _UNKNOWN)
            nodes = [] if known is None else [_node_of(tensor, self._tracer) for tensor in tensors]
        except Refusal:
            return self._run(func, types, args, kwargs)
        if isinstance(known, _Noted):
            with set_original_aten_op(func):
                return _recalled(known, tensors, nodes, self._tracer)
        before = self._tracer.graph._root._prev
        results = self._run(func, types, args, kwargs)
        if known is _UNKNOWN:
            try:
                self._known[key] = _Notes(tensors, nodes, self._tracer).of(before, results)
            except Refusal:
                self._known[key] = None
        return results

    def _key(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Hashable:
        """Equal for calls of which the same comes; `tensors` receives those that the call is given."""
        if not _may_be_noted(func) or self._marks_casts:
            raise _unnotable()
        said = _said(args, tensors), tuple([(name, _said(value, tensors)) for name, value in kwargs.items()])
        if not tensors:
            raise _unnotable()  # its result may be of any fake mode
        modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return func, said, modes


# what a call depends on


_OTHER = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


@functools.cache
def _may_be_noted(func: Any) -> bool:
    if (
        not is_operator_overload(func)
        or func.namespace not in ("aten", "prims")
        or schema_of(func).is_mutable
    ):
        return False
    return _OTHER.isdisjoint(func.tags) and func is not torch.ops.aten.lift_fresh.default


#: types of which equal values are the same argument. (Floats differ in the sign of zero.)
_PLAIN = frozenset(
    {bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)}
)


def _said(value: Any, tensors: list[FakeTensor]) -> Hashable:
    kind = type(value)
    if kind is FakeTensor:
        return _tensor_said(value, tensors)
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, *[_said(one, tensors) for one in value]
    if kind is float or kind is complex:
        return kind, repr(value)
    raise _unnotable()


def _tensor_said(value: FakeTensor, tensors: list[FakeTensor]) -> Hashable:
    for number, other in enumerate(tensors):
        if other is value:
            return number
    if (form := form_of(value)) is None or value.constant is not None:
        raise _unnotable()
    tensors.append(value)
    return form, value.requires_grad, value.is_inference()


def _node_of(value: FakeTensor, tracer: Any) -> fx.Node:
    known = get_proxy_slot(value, tracer, None)
    if known is None or known.constant is not None:
        raise _unnotable()
    node: fx.Node = known.proxy.node
    return node


#: entries of a node's metadata that follow from its value alone.
_COPIED = ("tensor_meta",)


class _Notes:
    """What comes of one call is noted.

    Args:
        tensors, nodes: that the call is given, and what stands for them in the graph.
        tracer: of the trace.
    """

    def __init__(self, tensors: Sequence[FakeTensor], nodes: Sequence[fx.Node], tracer: Any) -> None:
        self._tensors, self._tracer = tensors, tracer
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._memory: dict[int, int] = {}
        self._shared: set[int] = set()
        for number, tensor in enumerate(tensors):
            if self._memory.setdefault(_memory_of(tensor), number) != number:
                self._shared.add(_memory_of(tensor))
        if len(self._numbers) < len(nodes):
            raise _unnotable()  # one node stands for several tensors

    def of(self, before: fx.Node, results: Any) -> _Noted:
        """Note the nodes that stand behind `before`, and the `results`."""
        made: list[_Node] = []
        graph, node = before.graph, before
        while (node := node._next) is not graph._root:
            if node.op != "call_function":
                raise _unnotable()
            args = fx.map_arg(node.args, self._reference)
            kwargs = fx.map_arg(node.kwargs, self._reference)
            value = node.meta.get("val")
            if isinstance(value, (tuple, list)):
                said: Any = tuple(map(self._value, value))
            else:
                said = self._value(value)
            self._numbers[node] = len(self._numbers)
            meta = {key: node.meta[key] for key in _COPIED if key in node.meta}
            made.append(_Node(node.target, self._name(node.target), args, kwargs, said, meta))
        return _Noted(tuple(made), *self._results(results))

    def _reference(self, node: fx.Node) -> Any:
        if node not in self._numbers:
            raise _unnotable()
        return _Reference(self._numbers[node])

    def _name(self, target: Any) -> str | None:
        if isinstance(target, torch._ops.OpOverload):
            name: str = self._tracer.graph._target_to_str(target.overloadpacket.__name__)
            return name
        if target is operator.getitem:
            return None
        raise _unnotable()

    def _value(self, value: Any) -> _Value | None:
        if value is None:
            return None
        if (form := form_of(value)) is None or (memory := _memory_of(value)) in self._shared:
            raise _unnotable()
        return _Value(form, self._memory.setdefault(memory, len(self._tensors) + len(self._memory)))

    def _results(self, results: Any) -> tuple[Callable[..., Any] | None, tuple[int | None, ...]]:
        if not isinstance(results, (tuple, list)):
            return None, (self._result(results),)
        numbers = tuple([None if one is None else self._result(one) for one in results])
        return getattr(type(results), "_make", type(results)), numbers

    def _result(self, value: Any) -> int:
        for number, tensor in enumerate(self._tensors):
            if tensor is value:
                return number
        if (form := form_of(value)) is None or value.requires_grad:
            raise _unnotable()
        node = _node_of(value, self._tracer)
        number = self._numbers.get(node, -1)
        if number < len(self._tensors) or form != form_of(node.meta["val"]):
            raise _unnotable()
        return number


_UNKNOWN = object()


def _memory_of(value: torch.Tensor) -> int:
    memory: int = value.untyped_storage()._cdata
    return memory


def _recalled(noted: _Noted, tensors: Sequence[FakeTensor], nodes: Sequence[fx.Node], tracer: Any) -> Any:
    """Write what was noted once more, for other tensors, and give the results."""
    mode, stand = tensors[0].fake_mode, [*nodes]
    values: list[Any] = [*tensors]
    memory = {number: tensor.untyped_storage() for number, tensor in enumerate(tensors)}

    def made(value: _Value | None) -> Any:
        if value is None:
            return None
        fake = fake_of_form(mode, value.form, memory.get(value.memory))
        memory.setdefault(value.memory, fake.untyped_storage())
        return fake

    def resolved(argument: Any) -> Any:
        return stand[argument.number] if type(argument) is _Reference else argument

    for one in noted.nodes:
        args, kwargs = map_aggregate(one.args, resolved), map_aggregate(one.kwargs, resolved)
        node = tracer.create_node("call_function", one.target, args, kwargs, one.name)
        value = tuple(map(made, one.value)) if isinstance(one.value, tuple) else made(one.value)
        node.meta.update(one.meta, val=value)
        if len(values) in noted.results:
            value = made(one.value)
            set_proxy_slot(value, tracer, _ProxyTensor(tracer.proxy(node), None))
        stand.append(node)
        values.append(value)
    results = [None if number is None else values[number] for number in noted.results]
    return results[0] if noted.container is None else noted.container(results)
