"""Serialise graphs of ATen calls, their example values and their descriptions as one document of plain data.

In: a `Writer`, to which objects are passed one by one. Out: a document of JSON values, and the real tensors
that the writer met. From both, a `Reader` makes the same objects again. Repeated items, such as operators and
example values, are stored once, in the document's tables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.errors import ExportError, Refusal
from retrograd.graph.fx import lazy_graph_module
from retrograd.serialize.values import (
    read_operator,
    read_value,
    serialize_operator,
    serialize_value,
)
from retrograd.trace import fake_of_form, form_of

#: The ``meta`` entries that we write, and their types.
_NOTES: dict[str, type] = {
    "ac_graph_id": int,
    "autograd_node": str,
    "call_of_block": int,
    "is_backward": bool,
    "partitioner_tag": str,
    "recompute": CheckpointPolicy,
    "region": int,
    "seq_nr": int,
    "stack_trace": str,
}

_REAL = (torch.Tensor, torch.nn.Parameter)
_TABLES = ("operators", "notes", "forms", "examples")


class Writer:
    """Writes one document.

    Args:
        takes_tensors: whether real tensors may be written. The document does not contain their elements.

    Attributes:
        tensors: the real tensors so far. The document refers to them by position.
    """

    def __init__(self, takes_tensors: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self._takes_tensors = takes_tensors
        self._rows: dict[str, list[Any]] = {name: [] for name in _TABLES}
        self._places: dict[str, dict[Hashable, int]] = {name: {} for name in _TABLES}
        self._memory: dict[int, int] = {}

    def document(self, body: Any) -> dict[str, Any]:
        """The full document: `body`, which is built of what this writer returned, and the tables."""
        return {"body": body, **self._rows}

    def write(self, value: Any) -> Any:
        """Write a value: an argument of a call, a record, a container, or a fake with static sizes.

        Raises:
            Refusal: the value cannot be serialised.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return {"node": value.name} if isinstance(value, fx.Node) else serialize_value(value, self.write)

    def graph(self, gm: fx.GraphModule, inputs: Sequence[Any] = (), is_inner: bool = False) -> dict[str, Any]:
        """Write `gm`: its attributes and its nodes. A node is its kind, name, target, arguments, metadata and
        example value.

        Args:
            gm: the graph module.
            inputs: example values that replace those of the placeholders.
            is_inner: whether it is an attribute of another graph. Its example values are then omitted.

        Raises:
            ExportError: something in it cannot be serialised.
        """
        examples = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
        attributes: dict[str, Any] = {}
        nodes: list[list[Any]] = []
        for node in gm.graph.nodes:
            code, way_out = "graph", "replace the call by one of an operator"
            try:
                row = [node.op, node.name, self._target(gm, node, attributes), [], {}, self._notes(node)]
                if node.op != "placeholder":
                    row[3] = [self.write(value) for value in node.args]
                    row[4] = {key: self.write(value) for key, value in node.kwargs.items()}
                code, way_out = "unwritable", "capture with static sizes, and without subclasses"
                if node.op != "output" and not is_inner:
                    row.append(self.write(examples.get(node, node.meta.get("val"))))
            except Refusal as error:
                raise ExportError.because(
                    code,
                    f"the graph holds {error}",
                    "aot.export",
                    node=f"{node.name} ({node.target})",
                    way_out=way_out,
                ) from error
            nodes.append(row)
        return {"nodes": nodes, "attributes": attributes}

    def _target(self, gm: fx.GraphModule, node: fx.Node, attributes: dict[str, Any]) -> Any:
        if node.op == "call_function":
            return self._place("operators", node.target, partial(serialize_operator, node.target))
        if node.op != "get_attr":
            if node.op not in ("placeholder", "output"):
                raise Refusal("unwritable", f"a node of kind {node.op}")
            return None
        name = str(node.target)
        value: Any = operator.attrgetter(name)(gm)
        if isinstance(value, fx.GraphModule) and "." not in name:
            attributes[name] = {"graph": self.graph(value, is_inner=True)}
        elif type(value) in _REAL and "." not in name:
            attributes[name] = self.write(value)
        else:
            raise Refusal("unwritable", f"the attribute {name}, a {type(value).__name__},")
        return name

    def _notes(self, node: fx.Node) -> int:
        plain = {key: value for key, value in node.meta.items() if type(value) is _NOTES.get(key)}
        return self._place("notes", tuple(plain.items()), partial(self.write, plain))

    def _tensor(self, value: torch.Tensor) -> dict[str, int]:
        if (form := form_of(value)) is not None:
            memory = self._memory.setdefault(value.untyped_storage()._cdata, len(self._memory))
            row = [self._place("forms", form, partial(self.write, form)), memory]
            return {"example": self._place("examples", tuple(row), lambda: row)}
        if type(value) not in _REAL or value.layout is not torch.strided or not self._takes_tensors:
            raise Refusal("unwritable", f"a {type(value).__name__}, {value.layout}")
        self.tensors.append(value.detach())
        return {"tensor": len(self.tensors) - 1}

    def _place(self, table: str, key: Hashable, write: Callable[[], Any]) -> int:
        """The row number for `key`. If the key is new, `write` makes the row."""
        places = self._places[table]
        if key not in places:
            self._rows[table].append(write())
            places[key] = len(places)
        return places[key]


class Reader:
    """Reads a document that a `Writer` wrote.

    Args:
        document: the document.
        mode: the fake mode of the example values.

    Attributes:
        body: the document's body, not decoded.
        tensors: the writer's tensors. The caller must set them.

    Raises:
        ValueError, KeyError, TypeError, IndexError: the document is malformed.
    """

    def __init__(self, document: Mapping[str, Any], mode: Any) -> None:
        self.body, self.mode = document["body"], mode
        self.tensors: Sequence[torch.Tensor] = ()
        self._nodes: dict[str, fx.Node] = {}
        self._operators = [read_operator(one) for one in document["operators"]]
        self._notes = [self._read_notes(one) for one in document["notes"]]
        forms = [self.read(one) for one in document["forms"]]
        memory: dict[int, torch.UntypedStorage] = {}
        self._examples: list[Any] = []
        for form, place in document["examples"]:
            made = fake_of_form(mode, forms[form], memory.get(place))
            memory.setdefault(place, made.untyped_storage())
            self._examples.append(made)

    def read(self, written: Any) -> Any:
        """Read what `Writer.write` wrote.

        Raises:
            ValueError, KeyError, TypeError, IndexError: the data is malformed.
        """
        if type(written) is dict:
            if "node" in written:
                return self._nodes[written["node"]]
            if "example" in written:
                return self._examples[written["example"]]
            if "tensor" in written:
                return self.tensors[written["tensor"]]
        return read_value(written, self.read)

    def graph(self, written: Mapping[str, Any]) -> fx.GraphModule:
        """Read what `Writer.graph` wrote.

        Raises:
            ValueError, KeyError, TypeError, IndexError: the data is malformed.
        """
        outer, self._nodes = self._nodes, {}
        root, graph, held = torch.nn.Module(), fx.Graph(), written["attributes"]
        for name, value in held.items():
            if "graph" in value:
                root.add_module(name, self.graph(value["graph"]))
            else:
                root.register_buffer(name, self.tensors[value["tensor"]])
        for kind, name, target, args, kwargs, notes, *example in written["nodes"]:
            read = tuple(map(self.read, args)), {key: self.read(value) for key, value in kwargs.items()}
            if not all(map(str.isidentifier, (name, *kwargs))):  # they become part of generated code
                raise ValueError(f"{name!r} is no name of a node, or an argument has none")
            if kind == "call_function":
                called = self._operators[target]
            elif kind == "output":
                called = kind
            elif any(read):
                raise ValueError(f"a {kind} with arguments")
            elif kind == "placeholder":
                called = name
            elif kind == "get_attr" and target in held and target.isidentifier():
                called = target
            else:
                raise ValueError(f"a {kind} of {target}, which is unknown")
            node = self._nodes[name] = graph.create_node(kind, called, *read, name)
            node.name = name
            node.meta.update(self._notes[notes])
            if kind == "call_function":
                node.meta["original_aten"] = called  # Inductor names kernels by it
            if example:
                (node.meta["val"],) = map(self.read, example)
        self._nodes = outer
        return lazy_graph_module(root, graph, "joint")

    def _read_notes(self, written: Any) -> dict[str, Any]:
        read: dict[str, Any] = self.read(written)
        if not all(type(value) is _NOTES.get(key) for key, value in read.items()):
            raise ValueError(f"the notes {read!r:.80}")
        return read
