"""Joint graphs in files.

In: a `JointGraph` and a file. Out: a zip archive of JSON and the bytes of tensors; of such an archive, the
joint graph again, without its function: what needs the function again says so. What cannot be written is
refused by its name. Loading runs nothing that stands in the file: no pickle, no text that is evaluated, no
name that is imported. Nothing is compressed, so that a file takes memory in proportion to its size. torch's
own archives of programs are not used: loading them runs what they say.
"""

from __future__ import annotations

import ctypes
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, NoReturn

import torch

from retrograd._torch.state import ThreadModes
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import new_fake_mode
from retrograd.aot.capture import JointGraph
from retrograd.aot.examine import examine, examine_trace
from retrograd.config import checked
from retrograd.errors import (
    CaptureError,
    ExportError,
    LoadError,
    MissingFileError,
    Refusal,
    VerificationError,
    first_line,
)
from retrograd.graph.joint import Destination, verify_joint
from retrograd.graph.joint_graph import CaptureOptions, CaptureState, JointValues, Leaf, PrimalValue
from retrograd.passes.aten import PassReport
from retrograd.serialize import (
    checked_types,
    field_types,
    give_examples,
    is_of_type,
    read_examples,
    read_graph,
    read_spec,
    read_value,
    serialize_examples,
    serialize_graph,
    serialize_spec,
    serialize_value,
)
from retrograd.version import VERSION

#: of the files that are written; files of another one are refused.
SCHEMA = 9

_FORMAT = "retrograd-joint-graph"
_MANIFEST, _JOINT, _TENSORS = "manifest.json", "joint.json", "tensors.bin"
#: bytes of what may be compressed, as older releases did.
_SMALL = 2**16
File = str | os.PathLike[str] | IO[bytes]
_FILE = (
    lambda file: isinstance(file, (str, os.PathLike)) or hasattr(file, "seek"),
    "a path, or an open binary file",
)

_FOUND = "found/"
#: what of a `JointGraph` is written as it is.
FIELDS = (
    "signature",
    "values",
    "updates",
    "outputs",
    "by_dtype",
    "shared",
    "entered_as",
    "reenters",
)
#: what of the `CaptureOptions`. What else there is matters only to a capture, and a file holds no function.
_OPTIONS = ("single_region", "split_at_leaf_grads", "sums_apart")


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
        "in_spec": None if state.in_spec is None else _written_spec("the arguments", state.in_spec),
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
        "out_spec": _written_spec("the outputs", joint.out_spec),
        "primals": [_written(one.name, replace(one, fake=None, found=None)) for one in joint.primals],
        "gradients": [serialize_value(place) for place in joint.gradients],
        "options": serialize_value(tuple(getattr(joint.options, name) for name in _OPTIONS)),
        **{name: _written(name, getattr(joint, name)) for name in FIELDS},
    }


def _written_spec(name: str, spec: Any) -> Any:
    try:
        return [serialize_spec(spec)]
    except Refusal as error:
        way_out = "use tuples, lists and dicts"
        return _refuse("unwritable", f"{name} have {error}, which no file can hold", name, way_out)


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
        VerificationError: it breaks a law of joint graphs.
        Exception: it is nothing that was written so, or does not fit this torch.
    """
    mode, gm = new_fake_mode(False), read_graph(data["graph"], tensors)
    give_examples(gm, read_examples(data["examples"], mode))
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    found = read_trace(data, inputs, tensors)
    verify_joint(gm, found["signature"], "aot.load")
    state = _read_state(data, mode, {primal.leaf: primal.fake for primal in found["primals"]})
    gm.meta["signature"] = found["signature"]
    # As after a pass, nothing can trace the graph again for cotangents laid out otherwise: they are copied.
    joint = JointGraph(state=state, gm=gm, reports=(PassReport("load", 0.0),), **found)
    examine(joint)
    return joint


def read_trace(
    data: Mapping[str, Any], fakes: Sequence[Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """What `serialize_trace` wrote, as fields of a `JointGraph`, with the tensors that it names. The first of
    `fakes` are the primals.

    Raises:
        Exception: it is nothing that was written so.
    """
    primals = tuple(
        replace(_read_as(one, PrimalValue), fake=fakes[number], found=tensors.get(f"{_FOUND}{number}"))
        for number, one in enumerate(data["primals"])
    )
    found = {
        "primals": primals,
        "out_spec": read_spec(*data["out_spec"]),
        "gradients": {_read_as(place, tuple[int, Destination]): PLAIN for place in data["gradients"]},
        "options": CaptureOptions(*_read_as(data["options"], tuple[bool, bool, bool])),
        **{name: _read_as(data[name], field_types(JointValues)[name]) for name in FIELDS},
    }
    examine_trace(found)
    return found


def _read_as(written: Any, hint: Any) -> Any:
    if not is_of_type(found := read_value(written, {}), hint):
        raise ValueError(f"{found!r:.80} is no {hint}")
    return found


def _read_state(data: Mapping[str, Any], mode: Any, fakes: Mapping[int | None, Any]) -> CaptureState:
    leaves: list[Leaf] = []
    for number, one in enumerate(data["leaves"]):
        leaf: Leaf = _read_as(one, Leaf)
        fake = fakes.get(number if leaf.same_as is None else leaf.same_as)
        leaves.append(replace(leaf, value=fake) if leaf.kind else leaf)
    name = _read_as(data["name"], str)
    return CaptureState(
        name=name,
        call=_Absent(name),
        leaves=tuple(leaves),
        thread_modes=checked_types(ThreadModes(*read_value(data["modes"], {}))),
        fake_mode=mode,
        in_spec=None if data["in_spec"] is None else read_spec(*data["in_spec"]),
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


# tensors


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], bytes]:
    """How each lies in memory, and what stands there, one after the other."""
    table: dict[str, Any] = {}
    parts: list[bytes] = []
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            _refuse("unwritable", f"a tensor is a {type(tensor).__name__}, {tensor.layout}", name, _WAY_OUT)
        here = tensor.detach().resolve_conj().resolve_neg()
        steps = zip(here.shape, here.stride(), strict=True)
        span = 0 if here.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in steps)
        memory = here.as_strided((span,), (1,)).cpu().contiguous()
        form = [serialize_value(here.dtype), str(here.device), [*here.shape], [*here.stride()]]
        table[name] = [*form, span * here.element_size()]
        parts.append(ctypes.string_at(memory.data_ptr(), table[name][-1]) if span else b"")
    return table, b"".join(parts)


def _tensors_of(table: Mapping[str, Any], data: bytes) -> dict[str, torch.Tensor]:
    """What `_bytes_of` wrote.

    Raises:
        Exception: it is nothing that was written so.
    """
    found: dict[str, torch.Tensor] = {}
    start = 0
    for name, (dtype, device, size, stride, count) in table.items():
        part = bytearray(data[start : start + _read_as(count, int)])
        memory = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        typed = memory.view(_read_as(dtype, torch.dtype))
        typed = memory.ne(0) if typed.dtype is torch.bool else typed
        found[name] = typed.as_strided(size, stride).to(_read_as(device, str))
        start += len(part)
    if start != len(data):
        raise ValueError(f"{len(data)} bytes of tensors, not {start}")
    return found


# files


@checked(joint=(JointGraph, "what aot.capture returned"), file=_FILE)
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
    data["tensors"], kept = _bytes_of(tensors)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        archive.writestr(_JOINT, json.dumps(data))
        archive.writestr(_TENSORS, kept)


@checked(file=_FILE)
def load(file: File) -> JointGraph:
    """The joint graph in `file`, as `export` wrote it.

    It can be changed, partitioned and compiled; ``Compiled.with_state`` takes a module's state by name. The
    function itself is not in the file: what needs it again raises `CaptureError` (second derivatives, a
    backward under autocast, cotangents of another kind). A cotangent of another layout is copied.

    Raises:
        LoadError: the file is damaged, holds no joint graph, is of another version, or does not fit the
            installed torch.
        MissingFileError: there is no such file, or it cannot be opened.
    """
    manifest, data, kept = _contents(file)
    writer = f"written by retrograd {manifest.get('retrograd')} under torch {manifest.get('torch')}"
    try:
        return read_joint(data, _tensors_of(data["tensors"], kept))
    except VerificationError as error:
        raise _refused(
            "law", f"the joint graph in {_name(file)} breaks a law: {error.reason.text}", writer
        ) from error
    except Exception as error:
        found = f"the joint graph in {_name(file)} cannot be read: {first_line(error)}"
        raise _refused("contents", found, f"it was {writer}; export it again") from error


def _contents(file: File) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            manifest = json.loads(_stored_in(archive, _MANIFEST)) if _MANIFEST in names else None
            _check_manifest(file, manifest)
            if sorted(names) != sorted((_MANIFEST, _JOINT, _TENSORS)):
                raise ValueError(f"it holds {', '.join(names)[:80]}")
            data, kept = json.loads(_stored_in(archive, _JOINT)), _stored_in(archive, _TENSORS)
    except LoadError:
        raise
    except OSError as error:
        text = f"{_name(file)} cannot be opened: {error.strerror or error}"
        way_out = "the path of a file that aot.export wrote"
        raise MissingFileError.because("load-missing", text, "aot.load", way_out=way_out) from error
    except Exception as error:
        raise _refused(
            "damaged", f"{_name(file)} is damaged, or no joint graph: {first_line(error)}", "export it again"
        ) from error
    if not isinstance(data, dict):
        raise _refused("damaged", f"{_name(file)} is damaged: it holds no joint graph", "export it again")
    assert manifest is not None
    return manifest, data, kept


def _stored_in(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member of the archive, if it takes no more memory than in the file."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED and entry.file_size > _SMALL:
        raise ValueError(f"{name} is compressed, which aot.export does not do")
    return archive.read(name)


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
