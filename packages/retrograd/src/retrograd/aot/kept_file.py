"""A partition as bytes, for another process, and back.

In: a `Partition`, with the `Division` of each of its graphs. Out: bytes in three lines: a hash of the rest;
JSON that says what a process needs that finds all code compiled: the different parts of each graph and their
order, and what inputs and outputs mean; and JSON of the graphs themselves, which is read when somebody asks
for one. What is read costs as much as there are different layers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from retrograd.aot.capture import JointGraph, capture
from retrograd.aot.export import read_trace, serialize_trace
from retrograd.aot.partition import partition
from retrograd.aot.writes import writing_ahead
from retrograd.config import Policy
from retrograd.errors import Refusal
from retrograd.graph.joint_graph import CaptureState, Partition, RegionBackward, Saved
from retrograd.graph.lazy import KnownGraph, LazyGraph, Summary
from retrograd.process import cached_property
from retrograd.repeats.compile import Division, Step
from retrograd.serialize import (
    give_examples,
    read_examples,
    read_graph,
    read_value,
    serialize_examples,
    serialize_graph,
    serialize_value,
)


class _Values:
    """Example values, each written once. A value is told by its identity: nodes and records share them."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._places: dict[int, int] = {}

    def place(self, value: Any) -> int:
        """The number that stands for `value`."""
        if id(value) not in self._places:
            self._places[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._places[id(value)]

    def places(self, values: Iterable[Any]) -> list[int]:
        """The numbers that stand for `values`."""
        return [self.place(value) for value in values]

    def written(self) -> dict[str, Any]:
        """All of them."""
        return serialize_examples(self._kept)


def serialize_partition(made: Partition) -> bytes:
    """All of `made`, of whose graphs the division must be known.

    Raises:
        Refusal: something cannot be written.
        ExportError: likewise, in a graph.
    """
    joint: Any = made.joint
    if joint.options.split_at_leaf_grads or joint.reports:
        raise Refusal("unwritable", "what depends on hooks, or on passes")
    if any(primal.found is not None for primal in joint.primals):
        raise Refusal("unwritable", "tensors that the function found by itself")
    values, graphs = _Values(), made.graphs
    head = {
        "halves": [_serialize_half(graph, values) for graph in graphs],
        "saved": _serialize_saved(made.saved, values),
        "reads": [backward.saved for backward in made.backwards],
        "checked": [_serialize_saved(backward.checked, values) for backward in made.backwards],
        "overwritten": sorted(made.overwritten),
        "written_ahead": sorted(made.written_ahead),
        "released": sorted(made.released),
        **serialize_trace(joint),
    }
    whole = [graph.gm if head["halves"][i]["steps"] else None for i, graph in enumerate(graphs)]
    lines = {**head, "examples": values.written()}, [gm and _serialize_whole(gm) for gm in whole]
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_partition(data: bytes, state: CaptureState, policy: Policy, is_single_region: bool) -> Partition:
    """What `serialize_partition` wrote; the others are what the partition was made of.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: it is nothing that was written so, or
            does not fit this torch.
    """
    said, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != said:
        raise ValueError("it is damaged, or was not written here")
    first, _, rest = body.partition(b"\n")
    head = json.loads(first)
    values = read_examples(head["examples"], state.fake_mode)
    again = _Again(state, policy, is_single_region, rest)
    ahead, *behind = (_read_half(half, values, again.reader(i)) for i, half in enumerate(head["halves"]))
    joint = object.__new__(_KeptJoint)
    fields = read_trace(head, ahead.summary.inputs, {})
    joint.__dict__.update(state=state, reports=(), capture_again=again.joint, **fields)
    backwards = zip(behind, head["reads"], head["checked"], strict=True)
    return Partition(
        joint,
        ahead,
        _read_saved(head["saved"], values),
        tuple(
            RegionBackward(graph, tuple(reads), _read_saved(checked, values))
            for graph, reads, checked in backwards
        ),
        frozenset(head["overwritten"]),
        frozenset(head["written_ahead"]),
        frozenset(head["released"]),
    )


def name_graphs(made: Partition, data: bytes) -> None:
    """Name the graphs of `made`, which is written as `data`, by the hash in its first line."""
    said = data.partition(b"\n")[0].decode("ascii")
    for i, graph in enumerate(made.graphs):
        graph.known_as = f"{said} {i}"


def _serialize_saved(entries: Sequence[Saved], values: _Values) -> Any:
    return serialize_value([replace(entry, value=values.place(entry.value)) for entry in entries])


def _read_saved(written: Any, values: Sequence[Any]) -> tuple[Saved, ...]:
    return tuple(replace(entry, value=values[entry.value]) for entry in read_value(written, {}))


# a graph: its parts


def _serialize_half(graph: LazyGraph, values: _Values) -> dict[str, Any]:
    division: Division | None = graph.division
    if division is None or division.is_symbolic or division.sizes:
        raise Refusal("unwritable", "a graph that is not divided yet, or has symbolic sizes")
    numbers: dict[Hashable, int] = {key: number for number, key in enumerate(division.graphs)}
    summary = graph.summary
    return {
        "parts": [
            {**_serialize_graph(gm, values), "inputs": values.places(examples), "visible": visible}
            for gm, examples, visible in division.graphs.values()
        ],
        "steps": [[numbers[step.key], step.reads, step.makes] for step in division.steps],
        "results": [serialize_value(result) for result in division.results],
        "names": summary.names,
        "inputs": values.places(summary.inputs),
        "outputs": values.places(summary.results),
        "calls": summary.calls,
        "targets": sorted(summary.targets),
        "random_devices": [str(device) for device in summary.random_devices],
        "has_effects": [summary.has_effects, summary.has_effects_beside_random],
    }


def _read_half(
    written: Mapping[str, Any], values: Sequence[Any], read: Callable[[], fx.GraphModule]
) -> LazyGraph:
    inputs = [values[place] for place in written["inputs"]]
    parts: dict[Hashable, Any] = {}
    for number, part in enumerate(written["parts"]):
        gm = _read_graph(part, values)
        key = number if written["steps"] else None
        parts[key] = gm, [values[place] for place in part["inputs"]], part["visible"]
    if not written["steps"]:
        read = functools.partial(next, itertools.repeat(parts[None][0]))  # the whole is one part
    summary = Summary(
        tuple(written["names"]),
        tuple(inputs),
        tuple(values[place] for place in written["outputs"]),
        written["calls"],
        frozenset(written["targets"]),
        tuple(torch.device(device) for device in written["random_devices"]),
        *written["has_effects"],
    )
    steps = tuple(Step(key, tuple(reads), tuple(makes)) for key, reads, makes in written["steps"])
    results = tuple(read_value(result, {}) for result in written["results"])
    return KnownGraph(read, summary, Division(inputs, summary.names, parts, steps, results))


def _serialize_graph(gm: fx.GraphModule, values: _Values) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    written = {
        "graph": serialize_graph(gm, tensors),
        "values": values.places(node.meta.get("val") for node in gm.graph.nodes),
        "said": _said(gm),
    }
    if tensors:
        raise Refusal("unwritable", "tensors that the graph holds")
    return written


def _read_graph(written: Mapping[str, Any], values: Sequence[Any]) -> fx.GraphModule:
    gm = read_graph(written["graph"], {})
    give_examples(gm, (values[place] for place in written["values"]))
    if _said(gm) != written["said"]:
        raise ValueError("it is read as another graph than was written")
    return gm


def _said(gm: fx.GraphModule) -> str:
    return hashlib.sha256(str(gm.graph).encode()).hexdigest()


# what is seldom asked for


def _serialize_whole(gm: fx.GraphModule) -> dict[str, Any]:
    values = _Values()
    written = _serialize_graph(gm, values)
    return {**written, "examples": values.written()}


class _Again:
    """Graphs that are read when somebody asks for them, or captured again if they cannot be read."""

    def __init__(self, state: CaptureState, policy: Policy, is_single_region: bool, rest: bytes) -> None:
        self._state, self._policy, self._is_single_region = state, policy, is_single_region
        self._rest = rest

    def reader(self, number: int) -> Callable[[], fx.GraphModule]:
        """What gives graph `number`."""
        return functools.partial(self._read, number)

    def _read(self, number: int) -> fx.GraphModule:
        try:
            written = json.loads(self._rest)[number]
            return _read_graph(written, read_examples(written["examples"], self._state.fake_mode))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return self._made[number]

    @cached_property
    def _made(self) -> list[fx.GraphModule]:
        made = writing_ahead(partition(self.joint(), self._policy))  # Inductor's, which takes writes
        return [made.forward, *(backward.gm for backward in made.backwards)]

    def joint(self) -> JointGraph:
        """The joint graph."""
        return capture(self._state, single_region=self._is_single_region)


class _KeptJoint(JointGraph):
    """A joint graph without its graph, which is captured again if somebody looks at it."""

    def __getattr__(self, name: str) -> Any:
        if name != "gm":
            raise AttributeError(name)
        self.__dict__["gm"] = self.__dict__["capture_again"]().gm
        return self.__dict__["gm"]
