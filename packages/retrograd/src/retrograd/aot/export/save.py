"""Programs in files.

In: an `Exported` and a file. Out: a zip archive of JSON and tensors; of such an archive, the program again.
Loading runs nothing that stands in the file: no pickle of code, no text that is evaluated. torch's own
archives of programs are not used, because loading them does both.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import IO, Any

import torch

from retrograd.aot.export.exporter import program_of
from retrograd.aot.export.program import Exported
from retrograd.aot.export.representable import refuse_unrepresentable
from retrograd.aot.export.serialize_joint import read_joint, serialize_joint
from retrograd.errors import LoadError, VerificationError, first_line
from retrograd.graph.program import ProgramKind
from retrograd.graph.verify import verify_joint
from retrograd.version import VERSION

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
