"""A graph of ATen calls, and the values in it, as plain data, and back.

In: a graph module; what stands in the argument lists of such a graph, and the records that describe a joint
graph. Out: JSON values, and the tensors that the graph holds; of those, the same again. Nothing is looked up
by a name from a file but operators with a schema, and a fixed set of functions and records.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import SELF_CONTAINED, is_higher_order, is_operator_overload, lazy_graph_module
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import Form, fake_of_form, form_of
from retrograd.errors import ExportError, Refusal
from retrograd.graph import joint, joint_graph

Nodes = Mapping[str, fx.Node]

#: what is called without a schema; the rest of arithmetic is for symbolic sizes, which are not written.
_GETITEM = "operator.getitem"
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
    """The operator, with its schema if it has one."""
    if is_operator_overload(target):
        return {"name": target._schema.name, "overload": target._overloadname, "schema": _schema_text(target)}
    if is_higher_order(target):
        if target.name() in SELF_CONTAINED:
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
        if written["higher_order"] not in SELF_CONTAINED:
            raise ValueError(f"the operator of higher order {written['higher_order']!r} is unknown")
        return getattr(torch.ops.higher_order, written["higher_order"])
    namespace, _, name = written["name"].partition("::")
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name, None), written["overload"], None)
    if not is_operator_overload(found):
        raise ValueError(
            f"the operator {written['name']}.{written['overload']} is not registered in this process"
        )
    if _schema_text(found) != written["schema"]:
        raise ValueError(f"the operator {written['schema']} is {found._schema} in this process")
    return found


@functools.lru_cache(2048)
def _schema_text(operator: Any) -> str:
    """The text of its schema, which takes longer to make than the rest of a node to read."""
    return str(operator._schema)


_PLAIN = (bool, int, str, CheckpointPolicy)


def serialize_graph(gm: fx.GraphModule, tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
    """The nodes of `gm`; tensors that it holds are added to `tensors`."""
    modules: dict[str, Any] = {}
    nodes = []
    for node in gm.graph.nodes:
        try:
            entry: dict[str, Any] = {"op": node.op, "name": node.name}
            if node.op == "call_function":
                entry["target"] = serialize_operator(node.target)
            elif node.op == "get_attr":
                _write_attribute(gm, node, (tensors, prefix, modules))
                entry["target"] = node.target
            elif node.op not in ("placeholder", "output"):
                raise Refusal("unwritable", f"a node of kind {node.op}")
            if node.op != "placeholder":
                entry["args"] = [serialize_value(value) for value in node.args]
                entry["kwargs"] = {key: serialize_value(value) for key, value in node.kwargs.items()}
            entry["meta"] = {
                key: serialize_value(value) for key, value in node.meta.items() if isinstance(value, _PLAIN)
            }
        except Refusal as error:
            raise ExportError.because(
                "graph",
                f"the graph holds {error}",
                "aot.export",
                node=f"{node.name} ({node.target})",
                way_out="replace the call by one of an operator",
            ) from error
        nodes.append(entry)
    return {"nodes": nodes, "modules": modules}


def _write_attribute(
    gm: fx.GraphModule, node: fx.Node, to: tuple[dict[str, torch.Tensor], str, dict[str, Any]]
) -> None:
    tensors, prefix, modules = to
    name = str(node.target)
    value: Any = operator.attrgetter(name)(gm)
    if isinstance(value, fx.GraphModule) and "." not in name:
        modules[name] = serialize_graph(value, tensors, f"{prefix}{name}/")
    elif type(value) in (torch.Tensor, torch.nn.Parameter) and "." not in name:
        tensors[prefix + name] = value.detach()
    else:
        raise Refusal("unwritable", f"the attribute {name}, a {type(value).__name__},")


def read_graph(
    written: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], prefix: str = ""
) -> fx.GraphModule:
    """What `serialize_graph` wrote.

    Args:
        written, tensors, prefix: from there.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so.
    """
    root = torch.nn.Module()
    for name, inner in written["modules"].items():
        root.add_module(name, read_graph(inner, tensors, f"{prefix}{name}/"))
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for entry in written["nodes"]:
        nodes[entry["name"]] = _read_node(graph, entry, nodes)
        if entry["op"] == "get_attr" and entry["target"] not in written["modules"]:
            root.register_buffer(entry["target"], tensors[prefix + entry["target"]])
    return lazy_graph_module(root, graph, "joint")


def _read_node(graph: fx.Graph, entry: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> fx.Node:
    kind, name = entry["op"], entry["name"]
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a node")
    if kind == "placeholder":
        node = graph.placeholder(name)
    else:
        args = tuple(read_value(value, nodes) for value in entry["args"])
        kwargs = {key: read_value(value, nodes) for key, value in entry["kwargs"].items()}
        if kind == "output":
            node = graph.output(*args)
        elif kind == "call_function":
            node = graph.call_function(read_operator(entry["target"]), args, kwargs)
        elif kind == "get_attr" and entry["target"].isidentifier():
            node = graph.create_node("get_attr", entry["target"], name=name)
        else:
            raise ValueError(f"a node of unknown kind {kind!r}")
    node.name = name
    node.meta.update({key: read_value(value, {}) for key, value in entry["meta"].items()})
    return node


def serialize_examples(values: Iterable[Any]) -> list[Any]:
    """The example values of nodes: numbers, and fake tensors of static sizes with what memory they share.

    Raises:
        Refusal: one is something else.
    """
    memory: dict[int, int] = {}
    return [_serialize_example(value, memory) for value in values]


def _serialize_example(value: Any, memory: dict[int, int]) -> Any:
    """Memory is numbered in the order of its first appearance."""
    if isinstance(value, (list, tuple)):
        return [_serialize_example(one, memory) for one in value]
    if not isinstance(value, torch.Tensor):
        return serialize_value(value)
    if (form := form_of(value)) is None:
        raise Refusal("unwritable", f"a value is a {type(value).__name__}, {value.layout}")
    number = memory.setdefault(value.untyped_storage()._cdata, len(memory))
    return {**vars(form), "dtype": serialize_value(form.dtype), "device": str(form.device), "memory": number}


def read_examples(gm: fx.GraphModule, written: Sequence[Any], mode: Any) -> None:
    """Give each node of `gm` its example value again, as a fake of `mode`.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that `serialize_examples` wrote of such a graph.
    """
    memory: list[torch.UntypedStorage] = []
    for node, value in zip(gm.graph.nodes, written, strict=True):
        if node.op != "output":
            node.meta["val"] = _read_example(value, memory, mode)


def _read_example(written: Any, memory: list[torch.UntypedStorage], mode: Any) -> Any:
    if isinstance(written, list):
        return tuple(_read_example(one, memory, mode) for one in written)
    if not isinstance(written, dict) or "memory" not in written:
        return read_value(written, {})
    dtype, device = read_value(written["dtype"], {}), torch.device(written["device"])
    form = Form(written["size"], written["stride"], written["offset"], dtype, device, written["nbytes"])
    if written["memory"] < len(memory):
        return fake_of_form(mode, form, memory[written["memory"]])
    made = fake_of_form(mode, form)
    memory.append(made.untyped_storage())
    return made
