"""A joint graph as plain data, and back.

In: a joint graph that can be represented. Out: JSON values and the tensors that it holds; of those, a joint
graph without its function: it can be partitioned, compiled and run, and what needs the function again says
so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch

from retrograd._torch import pytree
from retrograd._torch.state import ThreadModes
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import (
    Symbol,
    encoded,
    guards_of,
    size_of,
    symbolic_mode,
    symbols_of,
)
from retrograd.aot.capture import JointGraph
from retrograd.aot.export.serialize_graph import read_graph, serialize_graph
from retrograd.aot.export.serialize_values import read_value, serialize_value
from retrograd.errors import CaptureError
from retrograd.graph.joint_graph import CaptureState, JointValues, Leaf

_FOUND = "found/"
#: what of a `JointGraph` is written as it is.
_FIELDS = (
    "signature",
    "values",
    "updates",
    "outputs",
    "undefined_matters",
    "is_single_region",
    "sums_apart",
    "hooked_leaves",
)


def serialize_joint(joint: JointValues) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All of `joint`, and the tensors that it holds, by name.

    Raises:
        ValueError: something cannot be written; see `refuse_unrepresentable`.
    """
    tensors: dict[str, torch.Tensor] = {}
    examples = [node.meta["val"] for node in joint.gm.graph.find_nodes(op="placeholder")]
    sizes = [
        size for value in examples for size in (value.shape if isinstance(value, torch.Tensor) else [value])
    ]
    env, state = joint.state.fake_mode.shape_env, joint.state
    for number, primal in enumerate(joint.primals):
        if primal.found is not None:
            tensors[f"{_FOUND}{number}"] = primal.found.detach()
    data = {
        "name": state.name,
        "ambient": {
            "grad": state.thread_modes.grad,
            "autocast": [[device, serialize_value(dtype)] for device, dtype in state.thread_modes.autocast],
            "caches": state.thread_modes.autocast_caches,
        },
        "symbols": {name: asdict(symbol) for name, symbol in symbols_of(env, sizes).items()},
        "guards": guards_of(env),
        "examples": [_serialize_example(value) for value in examples],
        "leaves": [
            serialize_value(replace(leaf, value=None) if leaf.kind else leaf) for leaf in state.leaves
        ],
        "in_spec": None if state.in_spec is None else pytree.treespec_dumps(state.in_spec),
        "out_spec": pytree.treespec_dumps(joint.out_spec),
        "primals": [serialize_value(replace(primal, fake=None, found=None)) for primal in joint.primals],
        "gradients": [serialize_value(place) for place in joint.gradients],
        **{name: serialize_value(getattr(joint, name)) for name in _FIELDS},
        "graph": serialize_graph(joint.gm, tensors),
    }
    return data, tensors


def _serialize_example(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": encoded(value)}
    return {
        "size": [encoded(size) for size in value.shape],
        "stride": [encoded(stride) for stride in value.stride()],
        "dtype": serialize_value(value.dtype),
        "device": str(value.device),
    }


def read_joint(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> JointGraph:
    """What `serialize_joint` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so, or does not fit this torch.
    """
    symbols = {name: Symbol(**one) for name, one in data["symbols"].items()}
    mode, sizes = symbolic_mode(symbols, data["guards"])
    examples = [_read_example(one, mode, sizes) for one in data["examples"]]
    gm = read_graph(data["graph"], tensors, examples)
    primals = tuple(
        replace(read_value(one, {}), fake=examples[number], found=tensors.get(f"{_FOUND}{number}"))
        for number, one in enumerate(data["primals"])
    )
    fields = {name: read_value(data[name], {}) for name in _FIELDS}
    gm.meta["signature"] = fields["signature"]
    return JointGraph(
        state=_read_state(data, mode, {primal.leaf: primal.fake for primal in primals}),
        gm=gm,
        primals=primals,
        out_spec=_read_spec(data["out_spec"]),
        gradients={read_value(place, {}): PLAIN for place in data["gradients"]},
        **fields,
    )


def _read_example(one: Mapping[str, Any], mode: Any, sizes: Mapping[str, Any]) -> Any:
    if "number" in one:
        return size_of(one["number"], mode, sizes)
    shape, stride = ([size_of(tree, mode, sizes) for tree in one[key]] for key in ("size", "stride"))
    with mode:
        return torch.empty_strided(shape, stride, dtype=read_value(one["dtype"], {}), device=one["device"])


def _read_state(data: Mapping[str, Any], mode: Any, fakes: Mapping[int | None, Any]) -> CaptureState:
    leaves: list[Leaf] = []
    for number, one in enumerate(data["leaves"]):
        leaf: Leaf = read_value(one, {})
        fake = fakes.get(number if leaf.same_as is None else leaf.same_as)
        leaves.append(replace(leaf, value=fake) if leaf.kind else leaf)
    thread_modes = data["ambient"]
    autocast = tuple((device, read_value(dtype, {})) for device, dtype in thread_modes["autocast"])
    return CaptureState(
        name=data["name"],
        call=_Absent(data["name"]),
        leaves=tuple(leaves),
        thread_modes=ThreadModes(thread_modes["grad"], autocast, thread_modes["caches"]),
        fake_mode=mode,
        in_spec=None if data["in_spec"] is None else _read_spec(data["in_spec"]),
    )


class _Absent:
    """Stands for the function of a joint graph that was loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, leaves: Sequence[Any]) -> NoReturn:
        raise CaptureError.because(
            "loaded-graph",
            f"{self._name} was loaded from a file, which holds its joint graph, not the function; this "
            "(a second derivative, a backward under autocast, or cotangents of another kind) needs the "
            "function again",
            "aot.load",
            way_out="capture the function in this process",
        )


def _read_spec(text: str) -> Any:
    """A pytree whose containers are known in this process; none that would import a module by name."""
    if "__enum__" in text:
        raise ValueError("a container with enums in its structure")
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise ValueError(f"{error} Import what registers it before loading") from error
