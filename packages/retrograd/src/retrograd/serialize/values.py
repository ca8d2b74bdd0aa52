"""The values in a graph of ATen calls as plain data, and back.

In: what stands in the argument lists of such a graph, and the records that describe a joint graph. Out: JSON
values; of those, the same again. Names from a file are looked up in fixed tables, and among the operators
that are registered in this process. Nothing is imported, and nothing is called by such a name. A record's
fields have the types that its class declares.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.facts import functions
from retrograd._torch.fx import OF_TORCH, is_higher_order, is_operator_overload
from retrograd._torch.operators import is_registered
from retrograd._torch.subclass import PLAIN
from retrograd.errors import Refusal
from retrograd.graph import joint, joint_graph

Nodes = Mapping[str, fx.Node]
Record = typing.TypeVar("Record")

#: what is called without a schema; the rest of arithmetic is for symbolic sizes, which are not written.
_GETITEM = "operator.getitem"
#: operators of higher order that refer to nothing outside of their graph but a generator.
_DRAWING = ("run_and_save_rng_state", "run_with_rng_state")
#: dataclasses whose fields can be written.
_RECORDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (*vars(joint).values(), *vars(joint_graph).values())
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__.startswith(joint.__name__)
}


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
    """For values that are attributes of ``torch``, whose attributes are not asked for by a name from a file:
    of some names torch makes imports."""
    table = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, type)
    }
    return _Form(type, lambda value: str(value).removeprefix("torch."), lambda name, nodes: table[name])


def _enum(type: Any) -> _Form:
    return _Form(type, lambda member: member.value, lambda w, nodes: type(w))


def serialize_dict(value: dict[Any, Any]) -> Any:
    """A dictionary whose keys are texts.

    Raises:
        Refusal: there is no way to write it.
    """
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


def read_dict(written: Any, nodes: Nodes) -> dict[str, Any]:
    """What `serialize_dict` wrote; `nodes` by their names there."""
    return {key: read_value(one, nodes) for key, one in written.items()}


def _read_record(written: Any, nodes: Nodes) -> Any:
    name, fields = written
    return checked_types(_RECORDS[name](**read_dict(fields, nodes)))


def checked_types(record: Record) -> Record:
    """A record that was read, whose fields have the types that its class declares.

    Raises:
        ValueError: one has another type.
    """
    kind: Any = type(record)
    for field, hint in field_types(kind).items():
        if not is_of_type(found := getattr(record, field), hint):
            raise ValueError(f"{kind.__name__}.{field} is {type(found).__name__} {found!r:.80}")
    return record


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass, with their types."""
    return typing.get_type_hints(cls)


def is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value that was read is of a type as an annotation says it. No function is, and no number is a
    truth value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(is_of_type(value, one) for one in args)
    if origin is typing.Literal:
        return type(value) is str and value in args
    if origin is tuple and args[-1] is not ...:
        return type(value) is tuple and len(value) == len(args) and all(map(is_of_type, value, args))
    if origin in (tuple, frozenset):
        return type(value) is origin and all(is_of_type(one, args[0]) for one in value)
    return hint is Any or type(value) is hint


def read_device(written: Any, nodes: Nodes) -> torch.device:
    """A device by its name."""
    if type(written) is not str:
        raise ValueError(f"{written!r} is no device")
    return torch.device(written)


#: by their names in files; the last two are for values whose type is not listed.
_FORMS: dict[str, _Form] = {
    "float": _Form(float, repr, lambda w, nodes: float(w)),
    "complex": _sequence(complex, lambda parts: complex(*parts), lambda value: [value.real, value.imag]),
    "node": _Form(fx.Node, lambda value: value.name, lambda w, nodes: nodes[w]),
    "size": _sequence(torch.Size, torch.Size),
    "tuple": _sequence(tuple, tuple),
    "set": _sequence(frozenset, frozenset),
    "slice": _sequence(slice, lambda ends: slice(*ends), lambda value: [value.start, value.stop, value.step]),
    "dict": _Form(dict, serialize_dict, read_dict),
    "plain": _Form(type(PLAIN), _serialize_plain, lambda w, nodes: PLAIN),
    "primal_kind": _enum(joint.PrimalKind),
    "saved_kind": _enum(joint_graph.SavedKind),
    "dtype": _attribute(torch.dtype),
    "layout": _attribute(torch.layout),
    "memory_format": _attribute(torch.memory_format),
    "device": _Form(torch.device, str, read_device),
    "policy": _Form(CheckpointPolicy, lambda value: value.name, lambda w, nodes: CheckpointPolicy[w]),
    "operator": _Form(None, lambda value: serialize_operator(value), lambda w, nodes: read_operator(w)),
    "record": _Form(None, _serialize_record, _read_record),
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
    """The operator, with its schema if it has one."""
    if is_operator_overload(target):
        _check_may_be_named(target)
        return {"name": target._schema.name, "overload": target._overloadname, "schema": _schema_text(target)}
    if is_higher_order(target):
        if target.name() in (*functions("self_contained"), *_DRAWING):
            return {"higher_order": target.name()}
        raise Refusal(
            "unwritable", f"the higher-order operator {target.name()}, which refers to this process"
        )
    if target is not operator.getitem:
        raise Refusal("unwritable", f"{getattr(target, '__name__', target)}, a function without a schema")
    return {"function": _GETITEM}


def read_operator(written: Any) -> Any:
    """What `serialize_operator` wrote."""
    if "function" in written:
        if written["function"] != _GETITEM:
            raise ValueError(f"the function {written['function']!r} is unknown")
        return operator.getitem
    if "higher_order" in written:
        if written["higher_order"] not in (*functions("self_contained"), *_DRAWING):
            raise ValueError(f"the operator of higher order {written['higher_order']!r} is unknown")
        return getattr(torch.ops.higher_order, written["higher_order"])
    namespace, _, name = written["name"].partition("::")
    if not is_registered(written["name"], written["overload"]):
        raise ValueError(
            f"the operator {written['name']}.{written['overload']} is not registered in this process"
        )
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name), written["overload"])
    _check_may_be_named(found)
    if _schema_text(found) != written["schema"]:
        raise ValueError(f"the operator {written['schema']} is {found._schema} in this process")
    return found


def _check_may_be_named(found: Any) -> None:
    """Of torch's operators one opens a file. Those of other libraries that take a text may do that too."""
    takes_text = any(str(argument.type) in ("str", "Optional[str]") for argument in found._schema.arguments)
    if found._schema.name == "aten::from_file" or (takes_text and found.namespace not in OF_TORCH):
        raise Refusal(
            "unwritable", f"the operator {found._schema.name}, which may open a file that it names,"
        )


@functools.lru_cache(2048)
def _schema_text(operator: Any) -> str:
    """The text of its schema, which takes longer to make than the rest of a node to read."""
    return str(operator._schema)
