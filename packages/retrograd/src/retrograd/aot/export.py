"""Joint graphs in files.

In: a `JointGraph` and a file. Out: a zip archive of JSON and tensors; of such an archive, the joint graph
again, without its function: what needs the function again says so. What cannot be written is refused by its
name. Loading runs nothing that stands in the file: no pickle of code, no text that is evaluated. torch's own
archives of programs are not used, because loading them does both.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, NoReturn

import torch

from retrograd._torch import pytree
from retrograd._torch.state import ThreadModes
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import new_fake_mode
from retrograd.aot.capture import JointGraph
from retrograd.errors import CaptureError, ExportError, LoadError, Refusal, VerificationError, first_line
from retrograd.graph.joint import verify_joint
from retrograd.graph.joint_graph import CaptureState, JointValues, Leaf
from retrograd.passes.aten import PassReport
from retrograd.serialize import (
    give_examples,
    read_examples,
    read_graph,
    read_value,
    serialize_examples,
    serialize_graph,
    serialize_value,
)
from retrograd.version import VERSION

#: of the files that are written; files of another one are refused.
SCHEMA = 7

_FORMAT = "retrograd-joint-graph"
_MANIFEST, _JOINT, _TENSORS = "manifest.json", "joint.json", "tensors.pt"
File = str | os.PathLike[str] | IO[bytes]

_FOUND = "found/"
#: what of a `JointGraph` is written as it is.
FIELDS = (
    "signature",
    "values",
    "updates",
    "outputs",
    "undefined_matters",
    "with_functions",
    "saving",
    "entered_as",
    "is_single_region",
    "sums_apart",
    "hooked_leaves",
    "reenters",
)


def serialize_joint(joint: JointValues) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """All of `joint`, and the tensors that it holds, by name.

    Raises:
        ExportError: something cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    for number, primal in enumerate(joint.primals):
        if primal.found is not None and primal.differentiable:
            text = f"{joint.state.name} uses a tensor that requires grad and is not given to it"
            way_out = "make it an argument, or a parameter of the module that is captured"
            _refuse("found-tensor", text, f"primal {number}", way_out)
        if primal.found is not None:
            tensors[f"{_FOUND}{number}"] = primal.found.detach()
    state = joint.state
    leaves = [replace(leaf, value=None) if leaf.kind else leaf for leaf in state.leaves]
    return {
        "name": state.name,
        "modes": serialize_value(tuple(state.thread_modes)),
        "leaves": [_written(leaf.name, leaf) for leaf in leaves],
        "in_spec": None if state.in_spec is None else pytree.treespec_dumps(state.in_spec),
        "examples": _examples(joint),
        "graph": serialize_graph(joint.gm, tensors),
        **serialize_trace(joint),
    }, tensors


def serialize_trace(joint: JointValues) -> dict[str, Any]:
    """What tracing found besides the graph: what its inputs and outputs mean.

    Raises:
        ExportError: something cannot be written.
    """
    if joint.offsets_matter:
        text = f"{joint.state.name} reads where its inputs begin in their memory"
        _refuse("storage-offset", text, "inputs", "as_strided and storage_offset depend on it: use slices")
    if any(primal.group is not None for primal in joint.primals):
        text = "inputs share memory, and one of them is changed in place"
        _refuse("aliased-inputs", text, "inputs", "clone one of them before the call")
    if any(wrapping is not PLAIN for wrapping in joint.gradients.values()):
        _refuse("subclass", "a gradient is a tensor subclass", "gradients", _WAY_OUT)
    for number, plan in enumerate(joint.outputs):
        _written(f"output {number}", plan)
    return {
        "out_spec": pytree.treespec_dumps(joint.out_spec),
        "primals": [_written(one.name, replace(one, fake=None, found=None)) for one in joint.primals],
        "gradients": [serialize_value(place) for place in joint.gradients],
        **{name: _written(name, getattr(joint, name)) for name in FIELDS},
    }


_WAY_OUT = "return clones of views, and plain constants; unwrap tensor subclasses before the call"


def _examples(joint: JointValues) -> dict[str, Any]:
    try:
        return serialize_examples(node.meta.get("val") for node in joint.gm.graph.nodes)
    except Refusal as error:
        return _refuse(
            "unwritable", str(error), "values", "capture with static sizes, and without subclasses"
        )


def _written(name: str, value: Any) -> Any:
    try:
        return serialize_value(value)
    except Refusal as error:
        return _refuse("unwritable", f"{name} has {error}, which no file can hold", name, _WAY_OUT)


def _refuse(code: str, text: str, node: str, way_out: str) -> NoReturn:
    raise ExportError.because(code, text, "aot.export", node=node, way_out=way_out)


def read_joint(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> JointGraph:
    """What `serialize_joint` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is nothing that was written so, or does not fit this torch.
    """
    mode, gm = new_fake_mode(False), read_graph(data["graph"], tensors)
    give_examples(gm, read_examples(data["examples"], mode))
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    found = read_trace(data, inputs, tensors)
    state = _read_state(data, mode, {primal.leaf: primal.fake for primal in found["primals"]})
    gm.meta["signature"] = found["signature"]
    # As after a pass, nothing can trace the graph again for cotangents laid out otherwise: they are copied.
    return JointGraph(state=state, gm=gm, reports=(PassReport("load", 0.0),), **found)


def read_trace(
    data: Mapping[str, Any], fakes: Sequence[Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """What `serialize_trace` wrote, as fields of a `JointGraph`, with the tensors that it names. The first of
    `fakes` are the primals."""
    primals = tuple(
        replace(read_value(one, {}), fake=fakes[number], found=tensors.get(f"{_FOUND}{number}"))
        for number, one in enumerate(data["primals"])
    )
    return {
        "primals": primals,
        "out_spec": _read_spec(data["out_spec"]),
        "gradients": {read_value(place, {}): PLAIN for place in data["gradients"]},
        **{name: read_value(data[name], {}) for name in FIELDS},
    }


def _read_state(data: Mapping[str, Any], mode: Any, fakes: Mapping[int | None, Any]) -> CaptureState:
    leaves: list[Leaf] = []
    for number, one in enumerate(data["leaves"]):
        leaf: Leaf = read_value(one, {})
        fake = fakes.get(number if leaf.same_as is None else leaf.same_as)
        leaves.append(replace(leaf, value=fake) if leaf.kind else leaf)
    return CaptureState(
        name=data["name"],
        call=_Absent(data["name"]),
        leaves=tuple(leaves),
        thread_modes=ThreadModes(*read_value(data["modes"], {})),
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


def export(joint: JointGraph, file: File) -> None:
    """Write `joint` to `file`, a path or an open binary file.

    Parameters and buffers are inputs of the graph, so they are not in the file. Tensors that the function
    found by itself, and that do not require grad, are kept by value.

    Args:
        joint: from ``capture``, perhaps changed by passes.
        file: is written anew.

    Raises:
        ExportError: it has symbolic sizes, or refers to something of this process, such as a function or a
            tensor that is trained.
        VerificationError: the graph breaks a law of joint graphs.
        OSError: the file cannot be written.
    """
    verify_joint(joint.gm, joint.signature, "aot.export", [report.name for report in joint.reports])
    data, tensors = serialize_joint(joint)
    manifest = {"format": _FORMAT, "schema": SCHEMA, "retrograd": VERSION, "torch": torch.__version__}
    kept = io.BytesIO()
    torch.save(tensors, kept)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        archive.writestr(_JOINT, json.dumps(data))
        archive.writestr(_TENSORS, kept.getvalue())


def load(file: File) -> JointGraph:
    """The joint graph in `file`, as `export` wrote it.

    It can be changed, partitioned and compiled; ``Compiled.with_state`` takes a module's state by name. The
    function itself is not in the file: what needs it again raises `CaptureError` (second derivatives, a
    backward under autocast, cotangents of another kind). A cotangent of another layout is copied.

    Raises:
        LoadError: the file is damaged, holds no joint graph, is of another version, or does not fit the
            installed torch.
        OSError: the file cannot be read.
    """
    manifest, data, tensors = _contents(file)
    writer = f"written by retrograd {manifest.get('retrograd')} under torch {manifest.get('torch')}"
    try:
        joint = read_joint(data, tensors)
        verify_joint(joint.gm, joint.signature, "aot.load")
        return joint
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
            "damaged", f"{_name(file)} is damaged, or no joint graph: {first_line(error)}", "export it again"
        ) from error
    if not isinstance(data, dict) or not isinstance(tensors, dict):
        raise _refused("damaged", f"{_name(file)} is damaged: it holds no joint graph", "export it again")
    assert manifest is not None
    return manifest, data, tensors


def _check_manifest(file: File, manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _refused(
            "foreign", f"{_name(file)} is no joint graph that aot.export wrote", "aot.export(joint, file)"
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
