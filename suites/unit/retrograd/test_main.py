"""`retrograd cache`: what it says of the cache, and that code is found where an archive was unpacked."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from retrograd.__main__ import MANIFEST, made_of, main

pytestmark = pytest.mark.programs

PROGRAM = """
import torch, retrograd
from retrograd.events import counters
from torch._dynamo.utils import counters as of_torch
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
step = torch.compile(net, backend="retrograd", options={"strict": True})
torch.manual_seed(0)
step(torch.randn(3, 4)).sum().backward()
found = of_torch["inductor"]
print(counters["kept_partition_hits"], found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, with a file of each kind."""
    made = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made))
    for name in (
        "fxgraph/ab/abc/entry",
        "retrograd/cd/cdef.json",
        "xy/code.py",
        "xy/code.lock",
        "xy/part.tmp",
    ):
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345678")
    made.chmod(0o700)
    return made


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def archive_of(path: Path, *members: tarfile.TarInfo, manifest: bool = True, origin: Any = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        said = json.dumps(made_of() if origin is None else origin).encode()
        first = tarfile.TarInfo(MANIFEST if manifest else "other")
        first.size = len(said)
        tar.addfile(first, io.BytesIO(said))
        for member in members:
            tar.addfile(member, io.BytesIO(b"0" * member.size))
    return path


def test_info_counts_finished_files_by_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    said = capsys.readouterr().out
    assert str(folder) in said
    assert {line.split("  ")[1].strip() for line in said.splitlines()[1:]} == {
        "compiled graphs",
        "partitions and notes",
        "generated code",
    }


def test_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    assert main(["cache", "info"]) == 0
    assert "empty" in capsys.readouterr().out


def test_what_is_packed_is_unpacked_beside_what_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, other = tmp_path / "cache.tar.gz", tmp_path / "other"
    assert main(["cache", "pack", str(archive)]) == 0
    assert "3 files" in capsys.readouterr().out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(other))
    (other / "xy").mkdir(parents=True)
    (other / "xy/code.py").write_bytes(b"mine")
    assert main(["cache", "unpack", str(archive)]) == 0
    assert "2 files" in capsys.readouterr().out
    assert names(other) == {"fxgraph/ab/abc/entry", "retrograd/cd/cdef.json", "xy/code.py"}
    assert (other / "xy/code.py").read_bytes() == b"mine"


def test_code_of_another_release_is_announced(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "cache.tar.gz"
    main(["cache", "pack", str(archive)])
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert main(["cache", "unpack", str(archive)]) == 0
    assert "here is 9.9.9: code may not be found" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"garbage", b""])
def test_a_refused_archive_is_named(
    content: bytes, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "garbage.tar.gz"
    archive.write_bytes(content)
    assert main(["cache", "unpack", str(archive)]) == 1
    assert capsys.readouterr().err.startswith(f"retrograd cache unpack: {archive}: ")


def special(kind: bytes, to: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo("xy/special")
    member.type, member.linkname = kind, to
    return member


def large() -> tarfile.TarInfo:
    member = tarfile.TarInfo("xy/zeros")
    member.size = 2**24
    return member


SPECIAL = {
    "link": special(tarfile.SYMTYPE, "../../outside"),
    "hard link": special(tarfile.LNKTYPE, "../../outside"),
    "pipe": special(tarfile.FIFOTYPE),
    "device": special(tarfile.CHRTYPE),
    "folder": special(tarfile.DIRTYPE),
    "large": large(),
}
MANIFESTS = {
    "list": [1],
    "text": "retrograd",
    "number": 3,
    "nested": {"torch": {"a": 1}},
    "empty": {"torch": None},
}


@pytest.mark.parametrize(
    "fault",
    ["missing", "no archive", "cut off", "foreign", "outside", "absolute", *SPECIAL, *MANIFESTS],
)
def test_a_bad_archive_is_one_line(
    fault: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, before = tmp_path / "cache.tar.gz", names(folder)
    if fault == "no archive":
        archive.write_bytes(b"nothing of the kind")
    elif fault == "cut off":
        main(["cache", "pack", str(archive)])
        archive.write_bytes(archive.read_bytes()[:-20])
    elif fault == "foreign":
        archive_of(archive, manifest=False)
    elif fault == "outside":
        archive_of(archive, tarfile.TarInfo("../outside"))
    elif fault == "absolute":
        archive_of(archive, tarfile.TarInfo(str(tmp_path / "outside")))
    elif fault in SPECIAL:
        archive_of(archive, SPECIAL[fault])
    elif fault in MANIFESTS:
        archive_of(archive, origin=MANIFESTS[fault])
    capsys.readouterr()
    status, said = main(["cache", "unpack", str(archive)]), capsys.readouterr()
    assert not (tmp_path / "outside").exists()
    assert names(folder) == before
    assert status == 1
    assert len(said.err.strip().splitlines()) == 1
    assert said.err.startswith("retrograd cache unpack: ")


def test_an_archive_that_cannot_be_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for to in (tmp_path / "no" / "folder" / "a.tar.gz", tmp_path):
        assert main(["cache", "pack", str(to)]) == 1
        said = capsys.readouterr().err.strip().splitlines()
        assert said == [
            f"retrograd cache pack: {to} is a folder, or in none: name a file that can be written"
        ]


@pytest.mark.parametrize("arguments", [[], ["cache"], ["cache", "pack"], ["cache", "burn"]])
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2


@pytest.mark.timeout(600)
def test_another_machine_compiles_nothing(tmp_path: Path) -> None:
    def run(folder: str, *command: str) -> str:
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        return subprocess.run(
            [sys.executable, *command], env=env, check=True, capture_output=True, text=True, timeout=500
        ).stdout

    archive = str(tmp_path / "cache.tar.gz")
    assert run("here", "-c", PROGRAM).split()[0] == "0"
    run("here", "-m", "retrograd", "cache", "pack", archive)
    run("there", "-m", "retrograd", "cache", "unpack", archive)
    partitions, hits, misses = map(int, run("there", "-c", PROGRAM).split())
    assert (partitions, misses) == (1, 0)
    assert hits == 2


def test_no_flipped_bit_changes_a_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, damaged, other = tmp_path / "cache.tar.gz", tmp_path / "damaged", tmp_path / "other"
    main(["cache", "pack", str(archive)])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(other))
    data, draw, refused = archive.read_bytes(), random.Random(1), 0
    for bit in draw.sample(range(8 * len(data)), 300):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        status = main(["cache", "unpack", str(damaged)])
        refused += status
        found = {(other / name).read_bytes() for name in names(other)}
        assert found == ({b"12345678"} if status == 0 else set()), bit
        shutil.rmtree(other)
    assert refused > 150  # the others have no meaning, as those of a name


def test_other_programs_read_an_archive(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cache.tar.gz"
    main(["cache", "pack", str(archive)])
    with tarfile.open(archive) as tar:
        assert tar.getnames()[1:] == ["fxgraph/ab/abc/entry", "retrograd/cd/cdef.json", "xy/code.py"]
