"""Arguments and operators of a graph as plain data, and back.

In: what stands in the argument lists of an ATen graph, and the records that describe a joint graph. Out: JSON
values, and from those the same again. Nothing is looked up by a name from a file but operators with a schema,
and a fixed set of functions and records.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import is_higher_order, is_operator_overload
from retrograd._torch.subclass import PLAIN
from retrograd.errors import Refusal
from retrograd.graph import joint, joint_graph

Nodes = Mapping[str, fx.Node]

_ARITHMETIC = (
    "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "pow", "eq", "ne", "lt", "le",
    "gt", "ge", "and_", "or_", "not_", "lshift", "rshift", "abs",
)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt", "pow")},
    **{f"torch.{name}": getattr(torch, name) for name in dir(torch) if name.startswith("sym_")},
}
_NAMES = {function: name for name, function in reversed(_FUNCTIONS.items())}
#: dataclasses whose fields can be written.
_RECORDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (*vars(joint).values(), *vars(joint_graph).values())
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
#: operators of higher order that refer to nothing outside of the graph.
_HIGHER_ORDER = (
    "associative_scan", "auto_functionalized", "auto_functionalized_v2", "cond", "flex_attention",
    "flex_attention_backward", "invoke_subgraph", "map_impl", "out_dtype", "scan", "while_loop",
)  # fmt: skip


@dataclass(frozen=True)
class _Form:
    """How values of one type are written and read, where JSON has no form for them."""

    type: Any
    write: Callable[[Any], Any]
    read: Callable[[Any, Nodes], Any]


def _sequence(type: type, make: Callable[[list[Any]], Any], parts: Callable[[Any], Any] = list) -> _Form:
    return _Form(
        type, lambda value: serialize_value(parts(value)), lambda w, nodes: make(read_value(w, nodes))
    )


def _attribute(type: type) -> _Form:
    """For values that are attributes of ``torch``."""

    def read(name: str, nodes: Nodes) -> Any:
        if not isinstance(found := getattr(torch, name), type):
            raise ValueError(f"{name!r} is no {type.__name__}")
        return found

    return _Form(type, lambda value: str(value).removeprefix("torch."), read)


def _serialize_dict(value: dict[Any, Any]) -> Any:
    if not all(isinstance(key, str) for key in value):
        raise _unwritable(value)
    return {key: serialize_value(one) for key, one in value.items()}


def _serialize_record(value: Any) -> Any:
    name = type(value).__name__
    if _RECORDS.get(name) is not type(value):
        raise _unwritable(value)
    return [name, {one.name: serialize_value(getattr(value, one.name)) for one in dataclasses.fields(value)}]


def _serialize_plain(value: Any) -> Any:
    if value is not PLAIN:
        raise _unwritable(value)
    return True


def _unwritable(value: Any) -> Refusal:
    return Refusal("unwritable", f"{type(value).__name__} {value!r}"[:200])


def _read_dict(written: Any, nodes: Nodes) -> dict[str, Any]:
    return {key: read_value(one, nodes) for key, one in written.items()}


#: by their names in files; the last two are for values whose type is not listed.
_FORMS: dict[str, _Form] = {
    "float": _Form(float, repr, lambda w, nodes: float(w)),
    "complex": _sequence(complex, lambda parts: complex(*parts), lambda value: [value.real, value.imag]),
    "node": _Form(fx.Node, lambda value: value.name, lambda w, nodes: nodes[w]),
    "size": _sequence(torch.Size, torch.Size),
    "tuple": _sequence(tuple, tuple),
    "set": _sequence(frozenset, frozenset),
    "slice": _sequence(slice, lambda ends: slice(*ends), lambda value: [value.start, value.stop, value.step]),
    "dict": _Form(dict, _serialize_dict, _read_dict),
    "plain": _Form(type(PLAIN), _serialize_plain, lambda w, nodes: PLAIN),
    "primal_kind": _Form(joint.PrimalKind, lambda kind: kind.value, lambda w, nodes: joint.PrimalKind(w)),
    "dtype": _attribute(torch.dtype),
    "layout": _attribute(torch.layout),
    "memory_format": _attribute(torch.memory_format),
    "device": _Form(torch.device, str, lambda w, nodes: torch.device(w)),
    "policy": _Form(CheckpointPolicy, lambda value: value.name, lambda w, nodes: CheckpointPolicy[w]),
    "operator": _Form(None, lambda value: serialize_operator(value), lambda w, nodes: read_operator(w)),
    "record": _Form(None, _serialize_record, lambda w, nodes: _RECORDS[w[0]](**_read_dict(w[1], nodes))),
}
_NAME_OF = {form.type: name for name, form in _FORMS.items()}


def serialize_value(value: Any) -> Any:
    """A value that stands in an argument list.

    Raises:
        Refusal: there is no way to write it.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [serialize_value(one) for one in value]
    name = _NAME_OF.get(type(value)) or ("operator" if is_operator_overload(value) else "record")
    return {name: _FORMS[name].write(value)}


def read_value(written: Any, nodes: Nodes) -> Any:
    """What `serialize_value` wrote; `nodes` by their names there.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
    """
    if written is None or isinstance(written, (bool, int, float, str)):
        return written
    if isinstance(written, list):
        return [read_value(one, nodes) for one in written]
    ((name, inner),) = written.items()
    if name not in _FORMS:
        raise ValueError(f"a value of unknown kind {name!r}")
    return _FORMS[name].read(inner, nodes)


def serialize_operator(target: Any) -> Any:
    """The operator, with its schema if it has one.

    Raises:
        Refusal: another process could not find it.
    """
    if is_operator_overload(target):
        return {"name": target._schema.name, "overload": target._overloadname, "schema": str(target._schema)}
    if is_higher_order(target):
        if target.name() in _HIGHER_ORDER:
            return {"higher_order": target.name()}
        raise Refusal(
            "unwritable", f"the higher-order operator {target.name()}, which refers to this process"
        )
    try:
        return {"function": _NAMES[target]}
    except (KeyError, TypeError):
        raise Refusal(
            "unwritable", f"{getattr(target, '__name__', target)}, a function without a schema"
        ) from None


def read_operator(written: Any) -> Any:
    """What `serialize_operator` wrote.

    Raises:
        ValueError: it is unknown here, or has another schema.
    """
    if "function" in written:
        return _FUNCTIONS[written["function"]]
    if "higher_order" in written:
        if written["higher_order"] not in _HIGHER_ORDER:
            raise ValueError(f"the operator of higher order {written['higher_order']!r} is unknown")
        return getattr(torch.ops.higher_order, written["higher_order"])
    namespace, _, name = written["name"].partition("::")
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name, None), written["overload"], None)
    if not is_operator_overload(found):
        raise ValueError(
            f"the operator {written['name']}.{written['overload']} is not registered in this process"
        )
    if str(found._schema) != written["schema"]:
        raise ValueError(f"the operator {written['schema']} is {found._schema} in this process")
    return found
