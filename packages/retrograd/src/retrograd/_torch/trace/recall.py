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
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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
class NotedNode:
    """A node that a trace made: its arguments, with a `_Reference` for each node, and its example value.

    Attributes:
        value: a `_Value`, a number, None, or a tuple of them.
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

    nodes: Sequence[NotedNode]
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
                self._known[key] = _noted(tensors, nodes, self._tracer, before, results)
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


class Notes:
    """Nodes of one graph are noted, to be written for other inputs.

    Args:
        inputs: nodes that what is noted may read, each with its tensor.
        copied: which entries of their metadata are.

    Raises:
        Refusal: one node stands for several of the tensors.
    """

    def __init__(self, inputs: Iterable[tuple[fx.Node, FakeTensor]], copied: Collection[str]) -> None:
        self.nodes: list[NotedNode] = []
        self._copied, self._memory, self._shared = copied, dict[int, int](), set[int]()
        self._numbers: dict[fx.Node, int] = {}
        for number, (node, tensor) in enumerate(inputs):
            if self._numbers.setdefault(node, number) != number:
                raise _unnotable()
            if self._memory.setdefault(_memory_of(tensor), number) != number:
                self._shared.add(_memory_of(tensor))
        self._next_memory = len(self._numbers)

    def number_of(self, node: fx.Node) -> int:
        """The number of an input, or of a node that was noted: those stand behind the inputs.

        Raises:
            Refusal: it is neither.
        """
        if node not in self._numbers:
            raise _unnotable()
        return self._numbers[node]

    def add(self, node: fx.Node) -> None:
        """Note a node.

        Raises:
            Refusal: more than can be noted would have to be.
        """
        if node.op != "call_function":
            raise _unnotable()

        def reference(read: fx.Node) -> Any:
            return _Reference(self.number_of(read))

        value: Any = node.meta.get("val")
        said = tuple(map(self._value, value)) if isinstance(value, (tuple, list)) else self._value(value)
        meta = {key: node.meta[key] for key in self._copied if key in node.meta}
        args, kwargs = fx.map_arg(node.args, reference), fx.map_arg(node.kwargs, reference)
        self.nodes.append(NotedNode(node.target, _base_of_name(node), args, kwargs, said, meta))
        self._numbers[node] = len(self._numbers)

    def _value(self, value: Any) -> _Value | int | None:
        if value is None or type(value) is int:  # the attention of a GPU gives numbers, too
            return value
        if (form := form_of(value)) is None or (memory := _memory_of(value)) in self._shared:
            raise _unnotable()
        number = self._memory.setdefault(memory, self._next_memory)
        self._next_memory += number == self._next_memory
        return _Value(form, number)


def _base_of_name(node: fx.Node) -> str | None:
    if isinstance(node.target, torch._ops.OpOverload):
        name: str = node.graph._target_to_str(node.target.overloadpacket.__name__)
        return name
    if node.target is operator.getitem:
        return None
    raise _unnotable()


#: entries of a node's metadata that follow from its value alone.
_OF_VALUE = ("tensor_meta",)


def _noted(
    tensors: Sequence[FakeTensor], nodes: Sequence[fx.Node], tracer: Any, before: fx.Node, results: Any
) -> _Noted:
    """What a call made: the nodes that stand behind `before`, and the `results`.

    Args:
        tensors, nodes: that the call is given, and what stands for them in the graph of `tracer`.
    """
    notes, node = Notes(zip(nodes, tensors, strict=True), _OF_VALUE), before
    while (node := node._next) is not before.graph._root:
        notes.add(node)

    def number_of(value: Any) -> int:
        for number, tensor in enumerate(tensors):
            if tensor is value:
                return number
        if (form := form_of(value)) is None or value.requires_grad:
            raise _unnotable()
        node = _node_of(value, tracer)
        number = notes.number_of(node)
        if number < len(tensors) or form != form_of(node.meta["val"]):
            raise _unnotable()
        return number

    if not isinstance(results, (tuple, list)):
        return _Noted(notes.nodes, None, (number_of(results),))
    numbers = tuple([None if one is None else number_of(one) for one in results])
    return _Noted(notes.nodes, getattr(type(results), "_make", type(results)), numbers)


_UNKNOWN = object()


def _memory_of(value: torch.Tensor) -> int:
    memory: int = value.untyped_storage()._cdata
    return memory


def _recalled(noted: _Noted, tensors: Sequence[FakeTensor], nodes: Sequence[fx.Node], tracer: Any) -> Any:
    """Write what was noted once more, for other tensors, and give the results."""
    writing = Writing(tracer, tensors[0].fake_mode)
    for node, tensor in zip(nodes, tensors, strict=True):
        writing.give(node, tensor)
    for one in noted.nodes:
        writing.write(one, len(writing.nodes) in noted.results)
    results = [None if number is None else writing.values[number] for number in noted.results]
    return results[0] if noted.container is None else noted.container(results)


class Writing:
    """What was noted is written once more, into the graph of `tracer`.

    Attributes:
        nodes, values: by number: those given, then those written. The values of some are fakes with which the
            trace goes on.
    """

    def __init__(self, tracer: Any, mode: FakeTensorMode) -> None:
        self.nodes: list[fx.Node] = []
        self.values: list[Any] = []
        self._tracer, self._mode = tracer, mode
        self._memory: dict[int, torch.UntypedStorage] = {}

    def give(self, node: fx.Node, tensor: FakeTensor) -> None:
        """The next input: what stands for a tensor in the graph."""
        self._memory[len(self.nodes)] = tensor.untyped_storage()
        self.nodes.append(node)
        self.values.append(tensor)

    def expect(self) -> None:
        """The next input is not there yet."""
        self.nodes.append(None)  # type: ignore[arg-type]
        self.values.append(None)

    def receive(self, number: int, node: fx.Node, tensor: FakeTensor) -> None:
        """An input that was expected."""
        self._memory[number] = tensor.untyped_storage()
        self.nodes[number], self.values[number] = node, tensor

    def write(self, one: NotedNode, is_result: bool) -> None:
        """The next node; whether the trace goes on with its value."""
        args, kwargs = map_aggregate(one.args, self._resolved), map_aggregate(one.kwargs, self._resolved)
        node = self._tracer.add_call(one.target, args, kwargs, one.name)
        several = isinstance(one.value, tuple)
        value = tuple(map(self._made, one.value)) if several else self._made(one.value)
        node.meta.update(one.meta, val=value)
        if is_result:
            value = self._made(one.value)
            set_proxy_slot(value, self._tracer, _ProxyTensor(self._tracer.proxy(node), None))
        self.nodes.append(node)
        self.values.append(value)

    def _resolved(self, argument: Any) -> Any:
        return self.nodes[argument.number] if type(argument) is _Reference else argument

    def _made(self, value: _Value | int | None) -> Any:
        if not isinstance(value, _Value):
            return value
        fake = fake_of_form(self._mode, value.form, self._memory.get(value.memory))
        self._memory.setdefault(value.memory, fake.untyped_storage())
        return fake
