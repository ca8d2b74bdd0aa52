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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
#: operators of higher order that refer to nothing of this process.
_HIGHER_ORDER = frozenset({*SELF_CONTAINED, "run_and_save_rng_state", "run_with_rng_state"})
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


def _enum(type: Any) -> _Form:
    return _Form(type, lambda member: member.value, lambda w, nodes: type(w))


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
    "primal_kind": _enum(joint.PrimalKind),
    "saved_kind": _enum(joint_graph.SavedKind),
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
        if target.name() in _HIGHER_ORDER:
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
        if written["higher_order"] not in _HIGHER_ORDER:
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


class _Table:
    """Values that come again are written once; in their place stands a number."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._place: dict[Hashable, int] = {}

    def place(self, key: Hashable, write: Callable[[], Any]) -> int:
        """The number of the row of this key, which `write` makes if it is new."""
        if key not in self._place:
            self.rows.append(write())
            self._place[key] = len(self.rows) - 1
        return self._place[key]


def serialize_graph(gm: fx.GraphModule, tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
    """The nodes of `gm`, each as its kind, its name, what it calls, its arguments, and what is noted with it;
    tensors that it holds are added to `tensors`."""
    modules: dict[str, Any] = {}
    operators, notes = _Table(), _Table()
    nodes: list[list[Any]] = []
    for node in gm.graph.nodes:
        try:
            target: Any = None
            if node.op == "call_function":
                target = operators.place(node.target, partial(serialize_operator, node.target))
            elif node.op == "get_attr":
                _write_attribute(gm, node, (tensors, prefix, modules))
                target = node.target
            elif node.op not in ("placeholder", "output"):
                raise Refusal("unwritable", f"a node of kind {node.op}")
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            if node.op != "placeholder":
                args = [serialize_value(value) for value in node.args]
                kwargs = {key: serialize_value(value) for key, value in node.kwargs.items()}
            plain = {key: value for key, value in node.meta.items() if isinstance(value, _PLAIN)}
            noted = notes.place(tuple(plain.items()), partial(_serialize_dict, plain))
        except Refusal as error:
            raise ExportError.because(
                "graph",
                f"the graph holds {error}",
                "aot.export",
                node=f"{node.name} ({node.target})",
                way_out="replace the call by one of an operator",
            ) from error
        nodes.append([node.op, node.name, target, args, kwargs, noted])
    return {"nodes": nodes, "operators": operators.rows, "notes": notes.rows, "modules": modules}


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
    operators = [read_operator(operator) for operator in written["operators"]]
    notes = [_read_dict(noted, {}) for noted in written["notes"]]
    for kind, name, target, args, kwargs, noted in written["nodes"]:
        if kind == "call_function":
            target = operators[target]
        elif kind == "get_attr" and target not in written["modules"]:
            root.register_buffer(target, tensors[prefix + target])
        node = nodes[name] = _read_node(graph, (kind, name, target), args, kwargs, nodes)
        node.meta.update(notes[noted])
        if kind == "call_function":
            node.meta["original_aten"] = target  # by which Inductor names kernels
    return lazy_graph_module(root, graph, "joint")


def _read_node(
    graph: fx.Graph,
    what: tuple[str, str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nodes: Mapping[str, fx.Node],
) -> fx.Node:
    kind, name, target = what
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a node")
    read = tuple([read_value(value, nodes) for value in args])
    if kind == "placeholder":
        node = graph.placeholder(name)
    elif kind == "output":
        node = graph.output(*read)
    elif kind == "call_function":
        node = graph.call_function(target, read, {k: read_value(v, nodes) for k, v in kwargs.items()})
    elif kind == "get_attr" and target.isidentifier():
        node = graph.create_node("get_attr", target, name=name)
    else:
        raise ValueError(f"a node of unknown kind {kind!r}")
    node.name = name
    return node


def serialize_examples(values: Iterable[Any]) -> dict[str, Any]:
    """The example values of nodes: numbers, and fake tensors of static sizes, each as the numbers of its form
    and of its memory. Memory is numbered in the order of its first appearance.

    Raises:
        Refusal: one is something else.
    """
    memory: dict[int, int] = {}
    forms = _Table()

    def write(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return {"items": [write(one) for one in value]}
        if not isinstance(value, torch.Tensor):
            return serialize_value(value)
        if (form := form_of(value)) is None:
            raise Refusal("unwritable", f"a value is a {type(value).__name__}, {value.layout}")
        number = memory.setdefault(value.untyped_storage()._cdata, len(memory))
        return [forms.place(form, partial(_serialize_form, form)), number]

    return {"values": [write(value) for value in values], "forms": forms.rows}


def _serialize_form(form: Form) -> dict[str, Any]:
    return {**vars(form), "dtype": serialize_value(form.dtype), "device": str(form.device)}


def read_examples(written: Mapping[str, Any], mode: Any) -> list[Any]:
    """What `serialize_examples` wrote, as fakes of `mode`.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is nothing that was written so.
    """
    memory: list[torch.UntypedStorage] = []
    forms = [_read_form(form) for form in written["forms"]]

    def read(one: Any) -> Any:
        if isinstance(one, dict) and "items" in one:
            return tuple([read(inner) for inner in one["items"]])
        if not isinstance(one, list):
            return read_value(one, {})
        form, place = one
        if place < len(memory):
            return fake_of_form(mode, forms[form], memory[place])
        made = fake_of_form(mode, forms[form])
        memory.append(made.untyped_storage())
        return made

    return [read(one) for one in written["values"]]


def _read_form(written: Mapping[str, Any]) -> Form:
    dtype, device = read_value(written["dtype"], {}), torch.device(written["device"])
    return Form(
        tuple(written["size"]), tuple(written["stride"]), written["offset"], dtype, device, written["nbytes"]
    )


def give_examples(gm: fx.GraphModule, values: Iterable[Any]) -> None:
    """Give each node of `gm` its example value.

    Raises:
        ValueError: there are more of them, or fewer.
    """
    for node, value in zip(gm.graph.nodes, values, strict=True):
        if node.op != "output":
            node.meta["val"] = value
