"""Partitions on disk, so that another process neither traces nor cuts the same graph again.

In: a `CaptureState`, the graph from Dynamo that it calls, and the choices. Out: the `Partition` that an
earlier process made of the same, or None; a file for the next process.

A file holds JSON: the joint graph and the names of what is saved. Reading it runs nothing that stands there.
It stands beside Inductor's files, and whatever keeps Inductor from using its cache holds here as well. It is
written under another name first, so that no process sees half of it, and begins with a hash of the rest. What
cannot be written, or be read again as the same graphs, is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import fx

from retrograd._torch.inductor import cache_folder
from retrograd._torch.subclass import PLAIN
from retrograd._torch.trace import is_fake
from retrograd.aot.export.save import read_trace, serialize_trace
from retrograd.aot.export.serialize import read_graph, read_value, serialize_value
from retrograd.aot.kept_key import key_of
from retrograd.aot.partition import partition
from retrograd.config import Config
from retrograd.errors import Refusal
from retrograd.events import AOT_LOGS, counters
from retrograd.graph.joint_graph import CaptureState, Choice, Partition

_log = AOT_LOGS["cache"]

#: how the name of a file ends that is being written.
UNFINISHED = ".tmp"


@dataclass(frozen=True)
class KeptPartition:
    """The place of one partition on disk.

    Attributes:
        state: of which it is.
        file: where it stands, or will.
    """

    state: CaptureState
    file: Path

    def read(self) -> Partition | None:
        """The partition that an earlier process wrote; None if there is none, or none that can be read."""
        try:
            found = _read(self.file.read_bytes(), self.state)
        except FileNotFoundError:
            counters["kept_partition_misses"] += 1
            return None
        except Exception as error:  # damaged, foreign, or of operators that are not here
            _log.info("%s is not used: %s", self.file, error)
            counters["kept_partition_misses"] += 1
            return None
        counters["kept_partition_hits"] += 1
        return found

    def write(self, made: Partition) -> None:
        """Keep `made`, if it is the same when it is read again."""
        try:
            data = _written(made)
            read = _read(data, self.state)
            if _written(read) != data or _graphs(read) != _graphs(made):
                raise Refusal("unwritable", "what is read again as another graph")
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as to:
                to.write(data)
        except Exception as error:
            counters["kept_partition_refusals"] += 1
            _log.info("%s is not kept on disk: %s", self.state.name, error)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `file` at the end; if something raises, `file` stays as it is."""
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as to:
            yield to
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def kept_partition(state: CaptureState, gm: fx.GraphModule, config: Config) -> KeptPartition | None:
    """Where the partition of `state` stands, which calls `gm`; None if it cannot be named.

    Args:
        state: whose sizes are static.
        gm: from Dynamo.
        config: the choices.
    """
    try:
        name = key_of(state, gm, config)
        return KeptPartition(state, Path(cache_folder(), "retrograd", name[:2], f"{name}.json"))
    except Exception as error:
        counters["kept_partition_refusals"] += 1
        _log.info("%s is not looked up on disk: %s", state.name, error)
        return None


def _written(made: Partition) -> bytes:
    joint: Any = made.joint
    if joint.offsets_matter or joint.hooked_leaves or joint.reports:
        raise Refusal("unwritable", "what depends on offsets, on hooks, or on passes")
    if any(primal.found is not None or primal.group is not None for primal in joint.primals):
        raise Refusal("unwritable", "tensors that the function found by itself")
    if any(wrapping is not PLAIN for wrapping in joint.gradients.values()):
        raise Refusal("unwritable", "gradients that are subclasses")
    tensors: dict[str, torch.Tensor] = {}
    memory: dict[int, int] = {}
    data = {
        "examples": [_example(node.meta.get("val"), memory) for node in joint.gm.graph.nodes],
        "saved": sorted(made.choice.saved),
        "copies": sorted(made.choice.copies),
        **serialize_trace(joint, tensors),
    }
    if tensors:
        raise Refusal("unwritable", "tensors that the graph holds")
    body = json.dumps(data).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _read(data: bytes, state: CaptureState) -> Partition:
    said, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != said:
        raise ValueError("it is damaged, or was not written here")
    written = json.loads(body)
    gm = read_graph(written["graph"], {}, None)
    memory: list[torch.Tensor] = []
    with torch.no_grad(), state.fake_mode:
        for node, value in zip(gm.graph.nodes, written["examples"], strict=True):
            if node.op != "output":
                node.meta["val"] = _read_example(value, memory)
    joint = read_trace(written, gm, {}, lambda _: state)
    return partition(joint, Choice(frozenset(written["saved"]), frozenset(written["copies"])))


def _graphs(made: Partition) -> list[str]:
    backwards = [backward.gm for backward in made.backwards]
    return [str(gm.graph) for gm in (made.forward, *backwards)]


def _example(value: Any, memory: dict[int, int]) -> Any:
    """The example value of a node; memory is numbered in the order of its first appearance."""
    if isinstance(value, (list, tuple)):
        return [_example(one, memory) for one in value]
    if not isinstance(value, torch.Tensor):
        return serialize_value(value)
    if not is_fake(value) or value.layout is not torch.strided:
        raise Refusal("unwritable", f"a value is a {type(value).__name__}, {value.layout}")
    number = memory.setdefault(value.untyped_storage()._cdata, len(memory))
    dtype, device = serialize_value(value.dtype), str(value.device)
    return {"size": [*value.shape], "stride": [*value.stride()], "offset": value.storage_offset(),
            "bytes": value.untyped_storage().nbytes(), "dtype": dtype, "device": device,
            "memory": number}  # fmt: skip


def _read_example(written: Any, memory: list[torch.Tensor]) -> Any:
    if isinstance(written, list):
        return tuple(_read_example(one, memory) for one in written)
    if not isinstance(written, dict) or "memory" not in written:
        return read_value(written, {})
    size, stride = written["size"], written["stride"]
    if written["memory"] < len(memory):
        return memory[written["memory"]].as_strided(size, stride, written["offset"])
    dtype = read_value(written["dtype"], {})
    made = torch.empty_strided(size, stride, dtype=dtype, device=written["device"])
    if made.untyped_storage().nbytes() != written["bytes"]:  # it shows a part of its memory
        whole = torch.empty(written["bytes"] // made.itemsize, dtype=dtype, device=written["device"])
        made = whole.as_strided(size, stride, written["offset"])
    memory.append(made)
    return made
