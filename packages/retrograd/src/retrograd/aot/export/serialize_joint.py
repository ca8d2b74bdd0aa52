"""A joint graph as plain data, and back.

In: a joint graph that can be represented. Out: JSON values and the tensors that it holds; of those, a joint
graph without its function: it can be partitioned, compiled and run, and what needs the function again says
so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    strided_fake,
    symbolic_mode,
    symbols_of,
)
from retrograd.aot.export.serialize_graph import read_graph, serialize_graph
from retrograd.aot.export.serialize_roles import (
    read_destination,
    read_signature,
    written_destination,
    written_signature,
)
from retrograd.aot.export.serialize_values import read_value, written_value
from retrograd.aot.joint import JointGraph
from retrograd.errors import CaptureError, Reason
from retrograd.graph.capture_state import CaptureState, Leaf
from retrograd.graph.joint import PrimalKind
from retrograd.graph.joint_graph import (
    ComputedOutput,
    ConstantOutput,
    ForwardValue,
    JointValues,
    OutputPlan,
    PrimalValue,
    SameAs,
    SizeOutput,
    SizeValue,
    Update,
)

_FOUND = "found/"


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
            "grad": state.ambient.grad,
            "autocast": [[device, written_value(dtype)] for device, dtype in state.ambient.autocast],
            "caches": state.ambient.autocast_caches,
        },
        "symbols": {name: asdict(symbol) for name, symbol in symbols_of(env, sizes).items()},
        "guards": guards_of(env),
        "examples": [_written_example(value) for value in examples],
        "leaves": [_written_leaf(leaf) for leaf in state.leaves],
        "in_spec": None if state.in_spec is None else pytree.treespec_dumps(state.in_spec),
        "out_spec": pytree.treespec_dumps(joint.out_spec),
        "primals": [
            {"name": p.name, "differentiable": p.differentiable, "is_leaf": p.is_leaf, "leaf": p.leaf}
            for p in joint.primals
        ],
        "signature": written_signature(joint.signature),
        "values": [{"boundary": value.boundary, "is_visible": value.is_visible} for value in joint.values],
        "updates": [{"primal": u.primal, "value": u.value, "unseen": u.unseen} for u in joint.updates],
        "outputs": [_written_plan(plan) for plan in joint.outputs],
        "gradients": [[region, written_destination(of)] for region, of in joint.gradients],
        "undefined_matters": sorted(joint.undefined_matters),
        "is_single_region": joint.is_single_region,
        "graph": serialize_graph(joint.gm, tensors),
    }
    return data, tensors


def _written_example(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": encoded(value)}
    return {
        "size": [encoded(size) for size in value.shape],
        "stride": [encoded(stride) for stride in value.stride()],
        "dtype": written_value(value.dtype),
        "device": str(value.device),
    }


def _written_leaf(leaf: Leaf) -> dict[str, Any]:
    return {
        "name": leaf.name,
        "kind": leaf.kind.value if leaf.kind else None,
        "constant": None if leaf.kind else written_value(leaf.value),
        "requires_grad": leaf.requires_grad,
        "is_leaf": leaf.is_leaf,
        "same_as": leaf.same_as,
    }


def _written_plan(plan: OutputPlan) -> dict[str, Any]:
    match plan:
        case ComputedOutput(value):
            return {"value": value}
        case SameAs(source):
            return {"same_as": source}
        case ConstantOutput(constant):
            return {"constant": written_value(constant)}
        case SizeOutput(sizes):
            return {"sizes": [[size.value] if isinstance(size, SizeValue) else size for size in sizes]}
        case _:
            raise ValueError(f"an output that is a view: {plan}")


def read_joint(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> JointGraph:
    """What `serialize_joint` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so, or does not fit this torch.
    """
    symbols = {name: Symbol(**one) for name, one in data["symbols"].items()}
    mode, sizes = symbolic_mode(symbols, data["guards"])
    examples = [_read_example(one, mode, sizes) for one in data["examples"]]
    gm = read_graph(data["graph"], tensors, examples)
    gm.meta["signature"] = signature = read_signature(data["signature"])
    primals = tuple(
        PrimalValue(
            wrapping=PLAIN,
            fake=examples[number],
            found=tensors.get(f"{_FOUND}{number}"),
            **_checked_primal(one),
        )
        for number, one in enumerate(data["primals"])
    )
    return JointGraph(
        state=_read_state(data, mode, {primal.leaf: primal.fake for primal in primals}),
        gm=gm,
        signature=signature,
        primals=primals,
        values=tuple(ForwardValue(PLAIN, one["boundary"], one["is_visible"]) for one in data["values"]),
        updates=tuple(Update(one["primal"], one["value"], None, one["unseen"]) for one in data["updates"]),
        outputs=tuple(_read_plan(one) for one in data["outputs"]),
        out_spec=_read_spec(data["out_spec"]),
        gradients={(region, read_destination(of)): PLAIN for region, of in data["gradients"]},
        undefined_matters=frozenset(data["undefined_matters"]),
        is_single_region=data["is_single_region"],
    )


def _checked_primal(one: Mapping[str, Any]) -> Mapping[str, Any]:
    if set(one) != {"name", "differentiable", "is_leaf", "leaf"}:
        raise ValueError(f"a primal with entries {sorted(one)}")
    return one


def _read_example(one: Mapping[str, Any], mode: Any, sizes: Mapping[str, Any]) -> Any:
    if "number" in one:
        return size_of(one["number"], mode, sizes)
    shape, stride = ([size_of(tree, mode, sizes) for tree in one[key]] for key in ("size", "stride"))
    return strided_fake(
        mode, shape, stride, dtype=read_value(one["dtype"], {}), device=torch.device(one["device"])
    )


def _read_state(data: Mapping[str, Any], mode: Any, fakes: Mapping[int | None, Any]) -> CaptureState:
    leaves: list[Leaf] = []
    for number, one in enumerate(data["leaves"]):
        kind = None if one["kind"] is None else PrimalKind(one["kind"])
        same = one["same_as"]
        value = fakes[number if same is None else same] if kind else read_value(one["constant"], {})
        leaves.append(Leaf(one["name"], kind, value, one["requires_grad"], one["is_leaf"], same))
    ambient = data["ambient"]
    autocast = tuple((device, read_value(dtype, {})) for device, dtype in ambient["autocast"])
    return CaptureState(
        name=data["name"],
        call=_Absent(data["name"]),
        leaves=tuple(leaves),
        ambient=ThreadModes(ambient["grad"], autocast, ambient["caches"]),
        fake_mode=mode,
        in_spec=None if data["in_spec"] is None else _read_spec(data["in_spec"]),
    )


class _Absent:
    """Stands for the function of a joint graph that was loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, leaves: Sequence[Any]) -> NoReturn:
        raise CaptureError(
            Reason(
                "loaded-graph",
                f"{self._name} was loaded from a file, which holds its joint graph, not the function; this "
                "(a second derivative, a backward under autocast, or cotangents of another kind) needs the "
                "function again",
                "aot.load",
                way_out="capture the function in this process",
            )
        )


def _read_plan(one: Mapping[str, Any]) -> OutputPlan:
    ((kind, value),) = one.items()
    if kind == "constant":
        return ConstantOutput(read_value(value, {}))
    if kind == "sizes":
        return SizeOutput(tuple(SizeValue(*size) if isinstance(size, list) else size for size in value))
    if kind not in ("value", "same_as"):
        raise ValueError(f"an output of unknown kind {kind!r}")
    return ComputedOutput(value) if kind == "value" else SameAs(value)


def _read_spec(text: str) -> Any:
    """A pytree whose containers are known in this process; none that would import a module by name."""
    if "__enum__" in text:
        raise ValueError("a container with enums in its structure")
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise ValueError(f"{error} Import what registers it before loading") from error
