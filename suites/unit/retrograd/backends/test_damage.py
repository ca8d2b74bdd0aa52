"""Inductor's cache where it cannot be used, and with files in it that are damaged."""

from __future__ import annotations

import _csv as _csrc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from retrograd.backends.inductor.damage import is_cut_off, removed
from retrograd.report import process_report
from unit.retrograd.aot.second_process import in_a_new_process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's folder; not there yet."""
    tmp_path.chmod(0o700)
    made = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


PROGRAM = """
import warnings
warnings.simplefilter("always")
import retrograd, torch
x = torch.ones(4, 3)
retrograd.compile(torch.nn.Linear(3, 2), backend="aten")(x).sum().backward()
options = {"backend": "aten", "strict": True}
torch.compile(torch.nn.Linear(3, 2), backend="retrograd", options=options)(x).sum().backward()
print("trained")
"""


@pytest.mark.parametrize("below", ["", "deeper/down"])
def test_a_folder_that_cannot_be_made_is_replaced_and_said_once(tmp_path: Path, below: str) -> None:
    way = tmp_path / "way"
    way.write_text("a file in the way")
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(way / below),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.stdout == "trained\n", done.stderr[-2000:]
    assert done.stderr.count("FallbackWarning") == 1
    assert f"[cache-unusable] compiled code is kept for this process only: {way}" in done.stderr
    assert "TORCHINDUCTOR_CACHE_DIR, with a folder" in done.stderr
    assert way.read_text() == "a file in the way"


@pytest.mark.parametrize("keep", [0, 3, 40, 63, 64, 0.1, 0.5, 0.99, -1])
def test_a_library_that_is_cut_off(keep: float, tmp_path: Path) -> None:
    whole, part = Path(_csrc.__file__), tmp_path / "part.so"
    data = whole.read_bytes()
    assert not is_cut_off(whole)
    part.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    assert is_cut_off(part)


STEM = "c" + "a2" * 25 + "z"


@pytest.mark.parametrize(
    "text", [f"/cache/a2/{STEM}.main.so: file too short", f"module 'x.{STEM}' has no attribute"]
)
def test_what_an_error_tells_of_is_removed(folder: Path, text: str) -> None:
    mine, other = folder / "a2" / f"{STEM}.main.so", folder / "a2" / "other.so"
    mine.parent.mkdir(parents=True)
    for file in (mine, other):
        file.write_bytes(b"")
    error = RuntimeError("outer")
    error.__cause__ = ImportError(text)
    assert removed(error)
    assert (mine.exists(), other.exists()) == (False, True)
    assert not removed(error)
    assert not removed(ValueError("another fault"))


@pytest.mark.parametrize("name", ["k.json", "__grp__k.json", "k.cubin", "launcher.so", "k.hsaco"])
@pytest.mark.parametrize("keep", [0, 0.5])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_kernel_of_tritons_goes_with_its_file_that_is_cut_off(
    name: str, keep: float, is_elsewhere: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's errors name no file, and Triton finds a kernel by the group of its files."""
    home = tmp_path / "elsewhere" if is_elsewhere else folder / "triton" / "0"
    if is_elsewhere:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(home))
    library = Path(_csrc.__file__).read_bytes()
    for kernel in ("DAMAGED", "WHOLE"):
        (home / kernel).mkdir(parents=True)
        for one in ("k.json", "__grp__k.json", "k.cubin", "launcher.so", "k.hsaco", "k.ptx"):
            (home / kernel / one).write_bytes(b'{"a": 1}' if "json" in one else library)
    written_now = home / "WHOLE" / "tmp.pid_1_a" / "k.cubin"
    written_now.parent.mkdir()
    written_now.write_bytes(b"")
    error = RuntimeError("Triton Error [CUDA]: device kernel image is invalid in triton_poi_fused")
    part = home / "DAMAGED" / name
    part.write_bytes(part.read_bytes()[: int(keep * part.stat().st_size)])
    assert not removed(ValueError("another fault"))
    assert removed(error)
    assert not list((home / "DAMAGED").iterdir())
    assert len(list((home / "WHOLE").iterdir())) == 7
    assert written_now.exists()
    assert not removed(error)


def program(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".so", ".py", ".cpp", "fxgraph", "retrograd", "all"])
@pytest.mark.parametrize("keep", [0, 0.5, None])
def test_a_damaged_cache_is_made_again(folder: Path, kind: str, keep: float | None) -> None:
    first = in_a_new_process(program)
    files = [file for file in folder.rglob("*") if file.is_file()]
    chosen = [file for file in files if kind in ("all", file.suffix, *file.relative_to(folder).parts[:1])]
    assert chosen
    for file in chosen:
        data = file.read_bytes()
        file.unlink()  # this process has it open
        file.write_bytes(b"garbage" * 40 if keep is None else data[: int(keep * len(data))])
    again = in_a_new_process(program)
    assert all(map(torch.equal, first, again))
    assert not process_report.fallbacks
