"""Files of joint graphs with one thing changed: each is refused with a `LoadError`, also if its hash was made
to fit; or it is read. Nothing in one is imported, and none takes much memory."""

from __future__ import annotations

import copy
import io
import json
import random
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retrograd import aot
from retrograd.errors import LoadError
from retrograd.serialize import heading_of, packed, unpacked

#: a module that would be found, and that nobody imports.
PROBE = "never_imported_by_a_file"

#: what is put in place of a value.
ODD: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**62, 2**70, 1.5, "", "x", PROBE, f"{PROBE}.Kind", f"{PROBE}:Kind", [],
    {}, [1], [[]], {"tuple": []}, {"node": "nowhere"}, {"record": [PROBE, {}]}, {"dtype": PROBE},
    {"device": "cuda:99"}, {"operator": {"name": f"{PROBE}::x", "overload": "default", "schema": ""}},
    {"float": "nan"}, {"set": [1]}, {"__enum__": True, "fqn": f"{PROBE}:Kind", "name": "A"}, {"size": [3]},
    {"slice": [0, 1, 2]}, {"plain": True}, {"tuple": [{"node": "primals_0"}]},
    {"operator": {"function": "operator.getitem"}}, "aten::sin", "primals_0",
]  # fmt: skip


#: a tensor that the module finds by itself.
TABLE = torch.arange(4.0)


class Net(nn.Module):
    """Buffers, a closure's tensor, a list of values, random numbers, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.body(x * TABLE).split(3, dim=1)
        return {"loss": (a * b).sum() + x.sum(), "sizes": (x.shape, 3, "text"), "a": a.exp()}


def written() -> bytes:
    torch.manual_seed(0)
    file = io.BytesIO()
    aot.export(aot.capture(aot.create_state(Net(), (torch.randn(5, 4, requires_grad=True),))), file)
    return file.getvalue()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in decoded JSON, with each of its keys."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(one, (dict, list)):
            yield from places(one)


def edited(data: Any, draw: random.Random) -> None:
    """Change one thing in decoded JSON."""
    container, key = draw.choice([*places(data)])
    kind = draw.choice(["replace", "replace", "remove", "repeat", "swap", "nudge"])
    if kind == "remove":
        del container[key]
    elif kind == "repeat" and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == "swap":
        other, place = draw.choice([*places(data)])
        container[key] = copy.deepcopy(other[place])
    elif kind == "nudge" and isinstance(container[key], int):
        container[key] += draw.choice([-1, 1, 2])
    else:
        container[key] = copy.deepcopy(draw.choice(ODD))


def mutated(before: bytes, draw: random.Random) -> bytes:
    """The file with one thing changed: its bytes, its length, or a value in it, with a hash that fits."""
    kind = draw.choice(["bits", "cut", "tensors", *["json"] * 6])
    if kind == "bits":
        data = bytearray(before)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if kind == "cut":
        return before[: draw.randrange(len(before))]
    heading, (joint, tensors) = heading_of(before), unpacked(before)
    if kind == "json":
        data = json.loads(joint)
        edited(data, draw)
        joint = json.dumps(data).encode()
    else:
        place = draw.randrange(len(tensors))
        tensors = draw.choice([tensors[:place], tensors + b"0", bytes([*tensors[:place], 255]), b""])
    return packed(heading, [joint, tensors])


def tried(data: bytes) -> str | None:
    """Why the file is refused; a bare error is raised."""
    try:
        aot.load(io.BytesIO(data))
    except LoadError as error:
        return str(error.reason.code) if error.reason.way_out else "no way out"
    return None


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_whole(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{PROBE}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, draw = written(), random.Random(1)
    assert tried(before) is None
    files = [mutated(before, draw) for _ in range(count)]
    tracemalloc.start()
    found: list[str | None] = []
    bare: list[tuple[int, Exception]] = []
    for number, data in enumerate(files):
        try:
            found.append(tried(data))
        except Exception as error:
            bare.append((number, error))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not bare
    assert PROBE not in sys.modules
    assert most < 256 * 2**20
    assert "no way out" not in found
    assert found.count("load-contents") > count / 4
