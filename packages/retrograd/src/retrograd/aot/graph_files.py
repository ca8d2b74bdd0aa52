"""Write joint graphs to files, and load them.

`export`. In: a `JointGraph`. Out: a file with a heading, JSON, and the bytes of tensors. An error names
whatever cannot be written.

`load`. In: such a file. Out: the joint graph without its function; anything that needs the function raises.

A file that does not match its hash is refused. Loading executes nothing from the file: we use no pickle,
evaluate no text and import no names. We do not compress, so memory is proportional to file size. We do not
use torch's own archives of programs, because loading them runs code from the file.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from retrograd.aot.joint_capture import JointGraph
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
from retrograd.graph.joint import verify_joint
from retrograd.graph.joint_graph import CaptureOptions, CaptureState, JointValues
from retrograd.passes.aten import PassReport
from retrograd.runtime.modes import ThreadModes
from retrograd.runtime.pytree import TreeSpec, tree_flatten, tree_unflatten
from retrograd.runtime.subclass import PLAIN
from retrograd.serialize import Reader, Writer, heading_of, packed, unpacked
from retrograd.trace import Form, new_fake_mode
from retrograd.version import VERSION

#: the version of the file format; `load` refuses files of another one.
SCHEMA = 10

_FORMAT = "retrograd-joint-graph"
File = str | os.PathLike[str] | IO[bytes]
_FILE = (
    lambda file: isinstance(file, (str, os.PathLike)) or hasattr(file, "seek"),
    "a path, or an open binary file",
)

#: the attributes of a joint graph that are written unchanged.
FIELDS = tuple(
    one.name
    for one in fields(JointValues)
    if one.name not in ("state", "gm", "out_spec", "offsets_matter", "options")
)
#: the `CaptureOptions` that are written. The others matter only to a capture, and a file holds no function.
_OPTIONS = ("single_region", "split_at_leaf_grads", "separate_sums")

_WAY_OUT = "return clones of views, and plain constants; unwrap tensor subclasses before the call"


def _document(joint: JointValues, writer: Writer) -> dict[str, Any]:
    """All of `joint` as JSON data, except the elements of its tensors.

    Raises:
        ExportError: something cannot be written.
    """
    for number, primal in enumerate(joint.primals):
        if primal.found is not None and primal.differentiable:
            text = f"{joint.state.name} uses a tensor that requires grad and is not given to it"
            way_out = "make it an argument, or a parameter of the module that is captured"
            _refuse("found-tensor", text, f"primal {number}", way_out)
    state = joint.state
    body = {
        "graph": writer.graph(joint.gm),
        "name": state.name,
        "modes": writer.write([*state.thread_modes]),
        "leaves": [_written(writer, leaf.name, leaf) for leaf in state.leaves],
        "in_spec": None if state.in_spec is None else _written_spec(writer, "arguments", state.in_spec),
        **serialize_trace(joint, writer),
    }
    return writer.document(body)


def serialize_trace(joint: JointValues, writer: Writer) -> dict[str, Any]:
    """The results of tracing other than the graph, as JSON data: what its inputs and outputs mean.

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
        _written(writer, f"output {number}", plan)  # so that an error names the output's number
    return {
        "out_spec": _written_spec(writer, "outputs", joint.out_spec),
        "options": writer.write(tuple(getattr(joint.options, name) for name in _OPTIONS)),
        **{name: _written(writer, name, getattr(joint, name)) for name in FIELDS},
    }


def _written_spec(writer: Writer, name: str, spec: Any) -> Any:
    nested = tree_unflatten([None] * spec.num_leaves, spec)
    return _written(writer, f"the container of {name}", nested, "use tuples, lists and dicts")


def _written(writer: Writer, name: str, value: Any, way_out: str = _WAY_OUT) -> Any:
    try:
        return writer.write(value)
    except Refusal as error:
        return _refuse("unwritable", f"{name} has {error}, which no file can hold", name, way_out)


def _refuse(code: str, text: str, node: str, way_out: str) -> NoReturn:
    raise ExportError.because(code, text, "aot.export", node=node, way_out=way_out)


def _read_joint(reader: Reader) -> JointGraph:
    """Read what `_document` wrote.

    Raises:
        VerificationError: the graph breaks a law of joint graphs.
        Exception: the data is malformed, or does not fit this torch.
    """
    body = reader.body
    gm, found = reader.graph(body["graph"]), read_trace(body, reader)
    verify_joint(gm, found["signature"], "aot.load")
    gm.meta["signature"] = found["signature"]
    state = CaptureState(
        name=body["name"],
        call=_Absent(body["name"]),
        leaves=tuple(map(reader.read, body["leaves"])),
        thread_modes=ThreadModes(*reader.read(body["modes"])),
        fake_mode=reader.mode,
        in_spec=None if body["in_spec"] is None else _read_spec(reader, body["in_spec"]),
    )
    # As after a pass, a report marks a graph that we cannot retrace: we copy cotangents with other strides.
    return JointGraph(state=state, gm=gm, reports=(PassReport("load", 0.0),), **found)


def read_trace(written: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Read what `serialize_trace` wrote, as fields of a `JointGraph`.

    Raises:
        Exception: the data is malformed.
    """
    found = {name: reader.read(written[name]) for name in FIELDS}
    options = CaptureOptions(*reader.read(written["options"]))
    return {**found, "out_spec": _read_spec(reader, written["out_spec"]), "options": options}


def _read_spec(reader: Reader, written: Any) -> TreeSpec:
    leaves, spec = tree_flatten(reader.read(written))
    if any(leaf is not None for leaf in leaves):
        raise ValueError("a container in which something stands")
    return spec


class _Absent:
    """Stands for the function of a loaded joint graph; a call raises."""

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


def _bytes_of(writer: Writer) -> tuple[list[Any], bytes]:
    """The form (shape, strides, dtype) of each tensor, and the bytes of all tensors, concatenated."""
    table: list[Any] = []
    parts: list[bytes] = []
    for tensor in writer.tensors:
        here = tensor.resolve_conj().resolve_neg()
        steps = zip(here.shape, here.stride(), strict=True)
        span = 0 if here.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in steps)
        memory, nbytes = here.as_strided((span,), (1,)).cpu().contiguous(), span * here.element_size()
        form = Form(tuple(here.shape), here.stride(), 0, here.dtype, here.device, nbytes)
        table.append(writer.write(form))
        parts.append(ctypes.string_at(memory.data_ptr(), nbytes) if span else b"")
    return table, b"".join(parts)


def _tensors_of(reader: Reader, table: Sequence[Any], data: bytes) -> list[torch.Tensor]:
    """Read what `_bytes_of` wrote.

    Raises:
        Exception: the data is malformed.
    """
    found: list[torch.Tensor] = []
    start = 0
    for written in table:
        form: Form = reader.read(written)
        part = bytearray(data[start : start + form.nbytes])
        memory = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        typed = memory.ne(0) if form.dtype is torch.bool else memory.view(form.dtype)
        found.append(typed.as_strided(form.size, form.stride).to(form.device))
        start += len(part)
    if start != len(data):
        raise ValueError(f"{len(data)} bytes of tensors, not {start}")
    return found


# files


@checked(joint=(JointGraph, "what aot.capture returned"), file=_FILE)
def export(joint: JointGraph, file: File) -> None:
    """Write `joint` to `file`.

    Parameters and buffers are inputs of the graph, so they are not in the file. Captured closure tensors that
    do not require grad are stored by value.

    Args:
        joint: from ``capture``, perhaps changed by passes.
        file: a path, which is overwritten, or an open binary file.

    Raises:
        ExportError: `joint` has symbolic sizes, or refers to something in this process, such as a function or
            a closure tensor that requires grad.
        VerificationError: the graph breaks a law of joint graphs.
        OSError: the file cannot be written.
    """
    verify_joint(joint.gm, joint.signature, "aot.export", [report.name for report in joint.reports])
    writer = Writer(takes_tensors=True)
    data = _document(joint, writer)
    data["tensors"], kept = _bytes_of(writer)
    heading = {"format": _FORMAT, "schema": SCHEMA, "retrograd": VERSION, "torch": torch.__version__}
    written = packed(heading, [json.dumps(data).encode(), kept])
    if isinstance(file, (str, os.PathLike)):
        Path(file).write_bytes(written)
    else:
        file.write(written)


@checked(file=_FILE)
def load(file: File) -> JointGraph:
    """Load a joint graph that `export` wrote.

    You can change, partition and compile it; ``Compiled.with_state`` takes a module's state by name. The file
    does not contain the function, so second derivatives, a backward under autocast, and cotangents of another
    kind raise `CaptureError`. A cotangent with other strides is copied.

    Args:
        file: a path, or an open binary file.

    Raises:
        LoadError: the file is damaged, holds no joint graph, has another version, or does not fit the
            installed torch.
        MissingFileError: there is no such file, or it cannot be opened.
    """
    data = _bytes_in(file)
    heading = _heading(file, data)
    writer = f"written by retrograd {heading.get('retrograd')} under torch {heading.get('torch')}"
    try:
        contents, kept = unpacked(data)
    except Exception as error:
        raise _refused(
            "damaged", f"{_name(file)} is damaged: {first_line(error)}", "export it again"
        ) from error
    try:
        document = json.loads(contents)
        reader = Reader(document, new_fake_mode(False))
        reader.tensors = _tensors_of(reader, document["tensors"], kept)
        return _read_joint(reader)
    except VerificationError as error:
        raise _refused(
            "law", f"the joint graph in {_name(file)} breaks a law: {error.reason.text}", writer
        ) from error
    except Exception as error:
        found = f"the joint graph in {_name(file)} cannot be read: {first_line(error)}"
        raise _refused("contents", found, f"it was {writer}; export it again") from error


def _bytes_in(file: File) -> bytes:
    try:
        if isinstance(file, (str, os.PathLike)):
            return Path(file).read_bytes()
        file.seek(0)
        return file.read()
    except OSError as error:
        text = f"{_name(file)} cannot be opened: {error.strerror or error}"
        way_out = "the path of a file that aot.export wrote"
        raise MissingFileError.because("load-missing", text, "aot.load", way_out=way_out) from error


def _heading(file: File, data: bytes) -> dict[str, Any]:
    try:
        heading = heading_of(data)
    except (ValueError, RecursionError):
        heading = {}
    if heading.get("format") != _FORMAT:
        raise _refused(
            "foreign", f"{_name(file)} is no joint graph that aot.export wrote", "aot.export(joint, file)"
        )
    schema = heading.get("schema")
    if type(schema) is not int or schema < 1:
        raise _refused("damaged", f"{_name(file)} has no version", "export it again")
    if schema != SCHEMA:
        writer = f"written by retrograd {heading.get('retrograd')}"
        found = f"{_name(file)} has schema {schema}, {writer}; known is {SCHEMA}"
        other = "a newer retrograd, or export it with this one"
        raise _refused(*(("newer", found, other) if schema > SCHEMA else ("older", found, "export it again")))
    return heading


def _name(file: File) -> str:
    return str(file) if isinstance(file, (str, os.PathLike)) else "the file"


def _refused(code: str, text: str, way_out: str) -> LoadError:
    return LoadError.because(f"load-{code}", text, "aot.load", way_out=way_out)
