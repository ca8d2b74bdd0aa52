"""Serialise the values in a graph of ATen calls as plain data, and read them back.

In: arguments of such a graph's calls, the records that describe a joint graph, and certain containers. Out:
JSON values, and from those the same objects again. Names from a file are looked up only in fixed tables and
among the operators registered in this process. We import nothing and call nothing by such a name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.errors import Refusal
from retrograd.facts import functions
from retrograd.graph import joint, joint_graph, lazy, view_calls
from retrograd.graph.fx import OF_TORCH, is_higher_order, is_operator_overload
from retrograd.graph.operator_effects import is_registered
from retrograd.runtime.subclass import PLAIN
from retrograd.trace import Form

#: The only target without a schema that we write. Arithmetic on symbolic sizes is not written.
_GETITEM = "operator.getitem"
#: Higher-order operators that refer to nothing outside their graph except a generator.
_DRAWING = ("run_and_save_rng_state", "run_with_rng_state")
#: The dataclasses that we can write.
_RECORDS: dict[str, Any] = {"Form": Form} | {
    cls.__name__: cls
    for module in (joint, joint_graph, lazy, view_calls)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
}


#: Writes, or reads, a nested value.
Part = Callable[[Any], Any]


@dataclass(frozen=True)
class _Form:
    """How values of one type are written and read, if JSON has no form for them."""

    type: Any
    write: Callable[[Any, Part], Any]
    read: Callable[[Any, Part], Any]


def _plain(type: Any, write: Part, read: Part) -> _Form:
    """For types whose values contain no other values."""
    return _Form(type, lambda value, _: write(value), lambda written, _: read(written))


def _sequence(type: type, make: Callable[[list[Any]], Any], parts: Callable[[Any], Any] = list) -> _Form:
    return _Form(
        type,
        lambda value, write: [write(one) for one in parts(value)],
        lambda written, read: make([read(one) for one in written]),
    )


def _mapping(type: type, make: Callable[[Any], Any]) -> _Form:
    """For dictionaries."""

    def read_pairs(written: Any, read: Part) -> Any:
        items = [(read(key), read(one)) for key, one in written]
        if len(dict(items)) != len(items):
            raise ValueError(f"a dictionary with the keys {[key for key, _ in items]!r:.80}")
        return make(items)

    return _Form(type, lambda value, write: [[write(k), write(one)] for k, one in value.items()], read_pairs)


def _attribute(type: type) -> _Form:
    """For values that are attributes of ``torch``.

    We use a table instead of ``getattr`` with a name from a file, because torch imports modules for some
    names.
    """
    table = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, type)
    }
    return _plain(type, lambda value: str(value).removeprefix("torch."), table.__getitem__)


def _enum(type: Any) -> _Form:
    return _plain(type, lambda member: member.value, type)


def _serialize_record(value: Any, write: Part) -> Any:
    name = type(value).__name__
    if _RECORDS.get(name) is not type(value):
        raise _unwritable(value)
    return [name, {one.name: write(getattr(value, one.name)) for one in dataclasses.fields(value)}]


def _unwritable(value: Any) -> Refusal:
    return Refusal("unwritable", f"{type(value).__name__} {value!r}"[:200])


def _read_record(written: Any, read: Part) -> Any:
    name, fields = written
    return _RECORDS[name](**{key: read(one) for key, one in fields.items()})


def read_device(written: Any) -> torch.device:
    """The device with this name."""
    if type(written) is not str:
        raise ValueError(f"{written!r} is no device")
    return torch.device(written)


#: Forms by their names in files. The last two are for values whose type is not listed.
_FORMS: dict[str, _Form] = {
    "float": _plain(float, repr, float),
    "complex": _sequence(complex, lambda parts: complex(*parts), lambda value: [value.real, value.imag]),
    "ellipsis": _plain(type(...), lambda value: True, lambda written: ...),
    "size": _sequence(torch.Size, torch.Size),
    "tuple": _sequence(tuple, tuple),
    "set": _sequence(frozenset, frozenset, functools.partial(sorted, key=repr)),
    "slice": _sequence(slice, lambda ends: slice(*ends), lambda value: [value.start, value.stop, value.step]),
    "dict": _mapping(dict, dict),
    "ordered": _mapping(OrderedDict, OrderedDict),
    "plain": _plain(type(PLAIN), lambda value: True, lambda written: PLAIN),
    "primal_kind": _enum(joint.PrimalKind),
    "saved_kind": _enum(joint_graph.SavedKind),
    "dtype": _attribute(torch.dtype),
    "layout": _attribute(torch.layout),
    "memory_format": _attribute(torch.memory_format),
    "device": _plain(torch.device, str, read_device),
    "policy": _plain(CheckpointPolicy, lambda value: value.name, CheckpointPolicy.__getitem__),
    "operator": _plain(None, lambda value: serialize_operator(value), lambda written: read_operator(written)),
    "record": _Form(None, _serialize_record, _read_record),
}
_NAME_OF = {form.type: name for name, form in _FORMS.items()} | {set: "set", immutable_dict: "dict"}


def serialize_value(value: Any, write: Part) -> Any:
    """Convert a value to JSON. `write` converts nested values.

    Raises:
        Refusal: the value cannot be serialised.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [write(one) for one in value]
    name = _NAME_OF.get(type(value)) or ("operator" if is_operator_overload(value) else "record")
    return {name: _FORMS[name].write(value, write)}


def read_value(written: Any, read: Part) -> Any:
    """Read what `serialize_value` wrote. `read` reads nested values.

    Raises:
        ValueError, KeyError, TypeError: the data is malformed.
    """
    if written is None or isinstance(written, (bool, int, float, str)):
        return written
    if isinstance(written, list):
        return [read(one) for one in written]
    ((name, inner),) = written.items()
    if name not in _FORMS:
        raise ValueError(f"a value of unknown kind {name!r}")
    return _FORMS[name].read(inner, read)


def serialize_operator(target: Any) -> str:
    """The text of the operator's schema; its name if it has none."""
    if is_operator_overload(target):
        _check_may_be_named(target)
        return _schema_text(target)
    if is_higher_order(target):
        if target.name() in (*functions("self_contained"), *_DRAWING):
            return str(target.name())
        raise Refusal(
            "unwritable", f"the higher-order operator {target.name()}, which refers to this process"
        )
    if target is not operator.getitem:
        raise Refusal("unwritable", f"{getattr(target, '__name__', target)}, a function without a schema")
    return _GETITEM


def read_operator(written: str) -> Any:
    """Read what `serialize_operator` wrote."""
    if written == _GETITEM:
        return operator.getitem
    if written in (*functions("self_contained"), *_DRAWING):
        return getattr(torch.ops.higher_order, written)
    full = written.partition("(")[0]
    name, _, overload = full.partition(".")
    namespace, _, short = name.partition("::")
    if not is_registered(name, overload or "default"):
        raise ValueError(f"the operator {full} is not registered in this process")
    found: Any = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
    _check_may_be_named(found)
    if _schema_text(found) != written:
        raise ValueError(f"the operator {written} is {found._schema} in this process")
    return found


def _check_may_be_named(found: Any) -> None:
    """Refuse operators that may open a file: one of torch's, and other libraries' operators that take a
    string."""
    takes_text = any(str(argument.type) in ("str", "Optional[str]") for argument in found._schema.arguments)
    if found._schema.name == "aten::from_file" or (takes_text and found.namespace not in OF_TORCH):
        raise Refusal(
            "unwritable", f"the operator {found._schema.name}, which may open a file that it names,"
        )


@functools.lru_cache(2048)
def _schema_text(operator: Any) -> str:
    """The text of the operator's schema. It is cached, because making it takes longer than reading the rest
    of a node."""
    return str(operator._schema)
