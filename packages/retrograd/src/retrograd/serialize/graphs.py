"""A graph of ATen calls, with its example values, as plain data, and back.

In: a graph module. Out: JSON, and the tensors that the graph holds; of those, the same again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import lazy_graph_module
from retrograd._torch.trace import Form, fake_of_form, form_of
from retrograd.errors import ExportError, Refusal
from retrograd.serialize.values import (
    checked_types,
    read_device,
    read_dict,
    read_operator,
    read_value,
    serialize_dict,
    serialize_operator,
    serialize_value,
)

#: what of ``meta`` is written.
_NOTES: dict[str, type] = {
    "ac_graph_id": int,
    "autograd_node": str,
    "call_of_run": int,
    "is_backward": bool,
    "partitioner_tag": str,
    "recompute": CheckpointPolicy,
    "region": int,
    "seq_nr": int,
    "stack_trace": str,
}


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
            plain = {key: value for key, value in node.meta.items() if type(value) is _NOTES.get(key)}
            noted = notes.place(tuple(plain.items()), partial(serialize_dict, plain))
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
    notes = [_read_notes(noted) for noted in written["notes"]]
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


def _read_notes(written: Any) -> dict[str, Any]:
    read = read_dict(written, {})
    if not all(type(value) is _NOTES.get(key) for key, value in read.items()):
        raise ValueError(f"the notes {read!r:.80}")
    return read


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
    if kind in ("placeholder", "get_attr") and (read or kwargs):
        raise ValueError(f"a {kind} with arguments")
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
    dtype, device = read_value(written["dtype"], {}), read_device(written["device"], {})
    size, stride = tuple(written["size"]), tuple(written["stride"])
    return checked_types(Form(size, stride, written["offset"], dtype, device, written["nbytes"]))


def give_examples(gm: fx.GraphModule, values: Iterable[Any]) -> None:
    """Give each node of `gm` its example value.

    Raises:
        ValueError: there are more of them, or fewer.
    """
    for node, value in zip(gm.graph.nodes, values, strict=True):
        if node.op != "output":
            node.meta["val"] = value
