"""Programs in files.

In: an `Exported` and a file. Out: a zip archive of JSON and tensors; of such an archive, the program again,
without its function: what needs the function again says so. Loading runs nothing that stands in the file: no
pickle of code, no text that is evaluated. torch's own archives of programs are not used, because loading them
does both.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any, NoReturn

import torch
from torch import fx

from retrograd._torch import pytree
from retrograd._torch.state import ThreadModes
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import Symbol, encoded, guards_of, size_of, symbolic_mode, symbols_of
from retrograd.aot.capture import JointGraph
from retrograd.aot.export.exporter import program_of, refuse_unrepresentable
from retrograd.aot.export.program import Exported, ProgramKind
from retrograd.errors import CaptureError, LoadError, VerificationError, first_line
from retrograd.graph.joint import verify_joint
from retrograd.graph.joint_graph import CaptureState, JointValues, Leaf
from retrograd.serialize import read_graph, read_value, serialize_graph, serialize_value
from retrograd.version import VERSION

_FOUND = "found/"
#: what of a `JointGraph` is written as it is.
FIELDS = (
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
        **serialize_trace(joint, tensors),
    }
    return data, tensors


def serialize_trace(joint: JointValues, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What tracing found: the graph, and what its inputs and outputs mean. Tensors that the graph holds are
    added to `tensors`."""
    return {
        "out_spec": pytree.treespec_dumps(joint.out_spec),
        "primals": [serialize_value(replace(primal, fake=None, found=None)) for primal in joint.primals],
        "gradients": [serialize_value(place) for place in joint.gradients],
        **{name: serialize_value(getattr(joint, name)) for name in FIELDS},
        "graph": serialize_graph(joint.gm, tensors),
    }


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
    return read_trace(data, gm, tensors, lambda fakes: _read_state(data, mode, fakes))


def read_trace(
    data: Mapping[str, Any],
    gm: fx.GraphModule,
    tensors: Mapping[str, torch.Tensor],
    state_of: Callable[[Mapping[int | None, Any]], CaptureState],
) -> JointGraph:
    """What `serialize_trace` wrote, with its graph (which has example values) and the tensors that it names.
    `state_of` makes the state of the fakes of the leaves."""
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    primals = tuple(
        replace(read_value(one, {}), fake=fakes[number], found=tensors.get(f"{_FOUND}{number}"))
        for number, one in enumerate(data["primals"])
    )
    fields = {name: read_value(data[name], {}) for name in FIELDS}
    gm.meta["signature"] = fields["signature"]
    return JointGraph(
        state=state_of({primal.leaf: primal.fake for primal in primals}),
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


#: of the files that are written; files of another one are refused.
SCHEMA = 2

_FORMAT = "retrograd-aot-program"
_MANIFEST, _JOINT, _TENSORS = "manifest.json", "joint.json", "tensors.pt"
File = str | os.PathLike[str] | IO[bytes]


def save(exported: Exported, file: File) -> None:
    """Write `exported` to `file`, a path or an open binary file.

    Raises:
        ExportError: the program holds what cannot be written.
        OSError: the file cannot be written.
    """
    refuse_unrepresentable(exported.joint)
    data, tensors = serialize_joint(exported.joint)
    manifest = {
        "format": _FORMAT,
        "schema": SCHEMA,
        "retrograd": VERSION,
        "torch": torch.__version__,
        "kind": exported.kind.value,
        "loss": exported.loss,
    }
    kept = io.BytesIO()
    torch.save(tensors, kept)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        archive.writestr(_JOINT, json.dumps(data))
        archive.writestr(_TENSORS, kept.getvalue())


def load(file: File) -> Exported:
    """The program in `file`, as `save` wrote it.

    Its ``joint`` can be partitioned and compiled here. The function itself is not in the file: what needs it
    again raises `CaptureError` (second derivatives, a backward under autocast, cotangents of another kind).

    Raises:
        LoadError: the file is damaged, no such program, of a newer version, or does not fit the installed
            torch.
        OSError: the file cannot be read.
    """
    manifest, data, tensors = _contents(file)
    writer = f"written by retrograd {manifest.get('retrograd')} under torch {manifest.get('torch')}"
    try:
        joint = read_joint(data, tensors)
        verify_joint(joint.gm, joint.signature, "aot.load")
        refuse_unrepresentable(joint)
        return program_of(joint, ProgramKind(manifest["kind"]), manifest["loss"])
    except VerificationError as error:
        raise _refused(
            "law", f"the joint graph in {_name(file)} breaks a law: {error.reason.text}", writer
        ) from error
    except Exception as error:
        found = f"the joint graph in {_name(file)} cannot be read: {first_line(error)}"
        raise _refused("contents", found, f"it was {writer}; export it again") from error


def _contents(file: File) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            manifest = json.loads(archive.read(_MANIFEST)) if _MANIFEST in names else None
            _check_manifest(file, manifest)
            data = json.loads(archive.read(_JOINT))
            kept = io.BytesIO(archive.read(_TENSORS))
            tensors = torch.load(kept, weights_only=True)
    except (OSError, LoadError):
        raise
    except Exception as error:
        raise _refused(
            "damaged",
            f"{_name(file)} is damaged, or no exported program: {first_line(error)}",
            "export it again",
        ) from error
    if not isinstance(data, dict) or not isinstance(tensors, dict):
        raise _refused("damaged", f"{_name(file)} is damaged: it holds no joint graph", "export it again")
    assert manifest is not None
    return manifest, data, tensors


def _check_manifest(file: File, manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _refused(
            "foreign", f"{_name(file)} is no program that aot.save wrote", "aot.save(aot.export(joint), file)"
        )
    schema = manifest.get("schema")
    if type(schema) is not int or schema < 1:
        raise _refused("damaged", f"{_name(file)} has no version", "export it again")
    if schema != SCHEMA:
        writer = f"written by retrograd {manifest.get('retrograd')}"
        found = f"{_name(file)} has schema {schema}, {writer}; known is {SCHEMA}"
        other = "a newer retrograd, or export it with this one"
        raise _refused(*(("newer", found, other) if schema > SCHEMA else ("older", found, "export it again")))


def _name(file: File) -> str:
    return str(file) if isinstance(file, (str, os.PathLike)) else "the file"


def _refused(code: str, text: str, way_out: str) -> LoadError:
    return LoadError.because(f"load-{code}", text, "aot.load", way_out=way_out)
