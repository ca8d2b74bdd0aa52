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
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import is_higher_order, is_operator_overload
from retrograd._torch.subclass import PLAIN
from retrograd.errors import Refusal
from retrograd.graph import joint, joint_graph
from retrograd.graph.capture_state import Leaf

_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_SEQUENCES: dict[type, str] = {torch.Size: "size", tuple: "tuple", frozenset: "set"}
_ARITHMETIC = [
    "getitem",
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "neg",
    "pos",
    "pow",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
    "not_",
    "lshift",
    "rshift",
    "abs",
]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt", "pow")},
    **{f"torch.{name}": getattr(torch, name) for name in dir(torch) if name.startswith("sym_")},
}
_NAMES = {function: name for name, function in reversed(_FUNCTIONS.items())}
#: dataclasses whose fields can be written.
_RECORDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(joint.Primal, joint.Cotangent, joint.Output, joint.Gradient, joint.Destination, joint.Boundary),
        *(joint.Region, joint.BackwardStep, joint.JointSignature),
        *(joint_graph.SizeValue, joint_graph.ConstantOutput, joint_graph.ComputedOutput, joint_graph.SameAs),
        *(
            joint_graph.SizeOutput,
            joint_graph.ForwardValue,
            joint_graph.PrimalValue,
            joint_graph.Update,
            Leaf,
        ),
    )
}
#: operators of higher order that refer to nothing outside of the graph.
_HIGHER_ORDER = frozenset(
    [
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "scan",
        "while_loop",
    ]
)


def written_value(value: Any) -> Any:
    """A value that stands in an argument list.

    Raises:
        Refusal: there is no way to write it.
    """
    if value is None or (
        isinstance(value, (bool, int, str)) and not isinstance(value, (torch.SymInt, torch.SymBool))
    ):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [written_value(value.real), written_value(value.imag)]}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if type(value) in _SEQUENCES:
        return {_SEQUENCES[type(value)]: [written_value(one) for one in value]}
    if isinstance(value, list):
        return [written_value(one) for one in value]
    if isinstance(value, slice):
        return {"slice": [written_value(one) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: written_value(one) for key, one in value.items()}}
    return _written_name(value)


def _written_name(value: Any) -> Any:
    if _RECORDS.get(type(value).__name__) is type(value):
        fields = {one.name: written_value(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"record": [type(value).__name__, fields]}
    if value is PLAIN:
        return {"plain": True}
    if isinstance(value, joint.PrimalKind):
        return {"primal_kind": value.value}
    for kind, cls in _NAMED.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, CheckpointPolicy):
        return {"policy": value.name}
    if is_operator_overload(value):
        return {"operator": written_operator(value)}
    raise Refusal("unwritable", f"{type(value).__name__} {value!r}"[:200])


def read_value(written: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """What `written_value` wrote; `nodes` by their names there.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
    """
    if written is None or isinstance(written, (bool, int, float, str)):
        return written
    if isinstance(written, list):
        return [read_value(one, nodes) for one in written]
    ((kind, inner),) = written.items()
    if kind in _NAMED:
        found = getattr(torch, inner)
        if not isinstance(found, _NAMED[kind]):
            raise ValueError(f"{inner!r} is no {kind}")
        return found
    if kind in _READERS:
        return _READERS[kind](inner, nodes)
    raise ValueError(f"a value of unknown kind {kind!r}")


_READERS: dict[str, Callable[[Any, Mapping[str, fx.Node]], Any]] = {
    "node": lambda inner, nodes: nodes[inner],
    "float": lambda inner, nodes: float(inner),
    "complex": lambda inner, nodes: complex(*[read_value(one, nodes) for one in inner]),
    "tuple": lambda inner, nodes: tuple(read_value(one, nodes) for one in inner),
    "set": lambda inner, nodes: frozenset(read_value(one, nodes) for one in inner),
    "record": lambda inner, nodes: _RECORDS[inner[0]](
        **{name: read_value(one, nodes) for name, one in inner[1].items()}
    ),
    "plain": lambda inner, nodes: PLAIN,
    "primal_kind": lambda inner, nodes: joint.PrimalKind(inner),
    "size": lambda inner, nodes: torch.Size(inner),
    "slice": lambda inner, nodes: slice(*[read_value(one, nodes) for one in inner]),
    "dict": lambda inner, nodes: {key: read_value(one, nodes) for key, one in inner.items()},
    "device": lambda inner, nodes: torch.device(inner),
    "policy": lambda inner, nodes: CheckpointPolicy[inner],
    "operator": lambda inner, nodes: read_operator(inner),
}


def written_operator(target: Any) -> Any:
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
    """What `written_operator` wrote.

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
