"""Serialise a partition for another process, and read it back.

In: a `Partition`, with the `Division` of each of its graphs. Out: a file of two pieces of JSON. The first
suffices if all code is compiled already: the distinct subgraphs of each graph, their order, and what inputs
and outputs mean. The second holds the complete graphs, and we decode it only if one is used. So reading
takes time in proportion to the number of distinct layers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd.aot.graph_files import read_trace, serialize_trace
from retrograd.aot.joint_capture import JointGraph, capture
from retrograd.aot.partitioner import partition
from retrograd.aot.reinplacing import writing_ahead
from retrograd.config import Policy
from retrograd.errors import Refusal
from retrograd.graph.joint import Primal
from retrograd.graph.joint_graph import CaptureState, Partition, RegionBackward, Saved
from retrograd.graph.lazy import LazyGraph, Summary
from retrograd.process import cached_property
from retrograd.repeats.compile import Division, Step
from retrograd.serialize import Reader, Writer, heading_of, packed, unpacked


def serialize_partition(made: Partition) -> bytes:
    """Serialise `made`. The division of each of its graphs must be known.

    Raises:
        Refusal: something cannot be written.
        ExportError: something in the joint graph's metadata cannot be written.
    """
    joint: Any = made.joint
    if joint.options.split_at_leaf_grads or joint.reports:
        raise Refusal("unwritable", "what depends on hooks, or on passes")
    writer = Writer()
    head = {
        "halves": [_serialize_half(graph, writer) for graph in made.graphs],
        "saved": writer.write([*made.saved]),
        "backwards": [writer.write([[*one.saved], [*one.checked]]) for one in made.backwards],
        "sets": writer.write([made.overwritten, made.written_ahead, made.released]),
        **serialize_trace(joint, writer),
    }
    whole = [
        graph.gm if half["steps"] else None for graph, half in zip(made.graphs, head["halves"], strict=True)
    ]
    lines = writer.document(head), [gm and _serialize_whole(gm) for gm in whole]
    return packed({}, [json.dumps(line).encode() for line in lines])


def read_partition(data: bytes, state: CaptureState, policy: Policy, is_single_region: bool) -> Partition:
    """Read what `serialize_partition` wrote, given the arguments with which that partition was made.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: the data is malformed, or does not fit
            this torch.
    """
    first, rest = unpacked(data)
    reader = Reader(json.loads(first), state.fake_mode)
    head, recaptured = reader.body, _Recapture(state, policy, is_single_region, rest)
    ahead, *behind = (
        _read_half(half, reader, functools.partial(recaptured.graph, number))
        for number, half in enumerate(head["halves"])
    )
    found = _renamed(read_trace(head, reader), state)
    joint = _RecapturedGraph(recaptured.joint, state=state, reports=(), **found)
    backwards = zip(behind, map(reader.read, head["backwards"]), strict=True)
    return Partition(
        joint,
        ahead,
        _saved(reader.read(head["saved"])),
        tuple(RegionBackward(graph, tuple(reads), _saved(checked)) for graph, (reads, checked) in backwards),
        *reader.read(head["sets"]),
    )


def _renamed(found: dict[str, Any], state: CaptureState) -> dict[str, Any]:
    """`found` with the names of this state's leaves: it may have been written for a state with others."""
    primals = [
        primal if primal.leaf is None else replace(primal, name=state.leaves[primal.leaf].name)
        for primal in found["primals"]
    ]
    inputs = [
        replace(role, name=primals[role.index].name) if isinstance(role, Primal) else role
        for role in found["signature"].inputs
    ]
    signature = replace(found["signature"], inputs=tuple(inputs))
    return {**found, "primals": tuple(primals), "signature": signature}


def _saved(entries: Sequence[Any]) -> tuple[Saved, ...]:
    if not all(isinstance(entry, Saved) for entry in entries):
        raise ValueError("what is saved is something else")
    return tuple(entries)


def name_graphs(made: Partition, data: bytes) -> None:
    """Name the graphs of `made` after the hash in the heading of `data`, its serialised form."""
    fingerprint = heading_of(data)["sha256"]
    for i, graph in enumerate(made.graphs):
        graph.known_as = f"{fingerprint} {i}"


# the subgraphs of a graph


def _serialize_half(graph: LazyGraph, writer: Writer) -> dict[str, Any]:
    division: Division | None = graph.division
    if division is None or division.is_symbolic or division.sizes:
        raise Refusal("unwritable", "a graph that is not divided yet, or has symbolic sizes")
    numbers: dict[Hashable, int] = {key: number for number, key in enumerate(division.graphs)}
    return {
        "parts": [
            [_serialize_graph(gm, writer), writer.write([*examples]), visible]
            for gm, examples, visible in division.graphs.values()
        ],
        "steps": [[numbers[step.key], step.reads, step.makes] for step in division.steps],
        "results": writer.write(division.results),
        "summary": writer.write(graph.summary),
    }


def _read_half(written: Mapping[str, Any], reader: Reader, read: Callable[[], fx.GraphModule]) -> LazyGraph:
    parts: dict[Hashable, Any] = {}
    for number, (graph, examples, visible) in enumerate(written["parts"]):
        key = number if written["steps"] else None
        parts[key] = _read_graph(graph, reader), reader.read(examples), visible
    summary: Summary = reader.read(written["summary"])
    steps = tuple(Step(key, tuple(reads), tuple(makes)) for key, reads, makes in written["steps"])
    division = Division(summary.names, parts, steps, reader.read(written["results"]))
    return LazyGraph(read if steps else lambda: parts[None][0], lambda: summary, division)


def _serialize_graph(gm: fx.GraphModule, writer: Writer) -> list[Any]:
    return [writer.graph(gm), _fingerprint(gm)]


def _read_graph(written: Any, reader: Reader) -> fx.GraphModule:
    graph, fingerprint = written
    gm = reader.graph(graph)
    if _fingerprint(gm) != fingerprint:
        raise ValueError("it is read as another graph than was written")
    return gm


def _fingerprint(gm: fx.GraphModule) -> str:
    return hashlib.sha256(str(gm.graph).encode()).hexdigest()


# complete graphs, which are seldom used


def _serialize_whole(gm: fx.GraphModule) -> dict[str, Any]:
    writer = Writer()
    return writer.document(_serialize_graph(gm, writer))


class _Recapture:
    """Decodes complete graphs on demand, or captures the function again if they cannot be decoded."""

    def __init__(self, state: CaptureState, policy: Policy, is_single_region: bool, rest: bytes) -> None:
        self._state, self._policy, self._is_single_region = state, policy, is_single_region
        self._rest = rest

    def graph(self, number: int) -> fx.GraphModule:
        """The graph with this number: 0 is the forward, the others are the backwards."""
        try:
            reader = Reader(json.loads(self._rest)[number], self._state.fake_mode)
            return _read_graph(reader.body, reader)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return self._made[number].gm

    @cached_property
    def _made(self) -> Sequence[LazyGraph]:
        return writing_ahead(partition(self.joint(), self._policy)).graphs  # Inductor accepts writes

    def joint(self) -> JointGraph:
        """The joint graph, captured again."""
        return capture(self._state, single_region=self._is_single_region)


class _RecapturedGraph(JointGraph):
    """A joint graph without its graph module. When the module is used, we capture the function again."""

    _recapture: Any

    def __init__(self, recapture: Callable[[], JointGraph] | None = None, **found: Any) -> None:
        vars(self).update(found, _recapture=recapture)

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The graph module."""
        return self._recapture().gm
