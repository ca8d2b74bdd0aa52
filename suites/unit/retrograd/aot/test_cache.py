"""What was compiled is found again: bounded, by guards, and on disk by another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from retrograd import aot
from retrograd.backends.inductor import why_not_trusted
from retrograd.config import Config
from retrograd.events import counters
from retrograd.report import Report
from retrograd.specialize.callable import Specialized, Variant
from retrograd.specialize.guard import CallGuard


class Returns:
    """Code that returns one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.value

    def why_disabled(self) -> None:
        return None


def test_what_was_not_used_for_longest_goes() -> None:
    made: list[Any] = []

    def compile(key: Any, leaves: Any, known: Any) -> Variant:
        made.append(key)
        return Variant(None, Returns(key))

    specialized = Specialized("f", "aot.function", Config(cache_size=2), Report(), compile)
    assert [specialized(key, [], made.clear) for key in "abacab"] == [*"abacab"]
    assert made == ["a", "b", "c", "b"]
    specialized.clear()
    assert specialized("b", [], made.clear) == "b"
    assert made == ["a", "b", "c", "b", "b"]


def test_a_function_keeps_a_bounded_number_of_kinds() -> None:
    compiled = aot.function(lambda x, power: x**power, backend="eager", cache_size=2)
    x = torch.ones(3, requires_grad=True)
    before = counters["aot_compiles"]
    for power in (2, 3, 4):
        compiled(x, power)
    assert counters["aot_compiles"] - before == 3
    compiled(x, 4)
    compiled(x, 3)
    assert counters["aot_compiles"] - before == 3
    assert torch.equal(compiled(x + 1, 2), torch.full((3,), 4.0))
    assert counters["aot_compiles"] - before >= 4


def joint(fn: Any, *inputs: Any, dynamic: bool | None = None) -> tuple[list[Any], CallGuard]:
    captured = aot.capture(aot.create_state(fn, inputs, dynamic=dynamic))
    return list(inputs), CallGuard.for_joint(inputs, captured)


def test_a_guard_looks_at_what_the_capture_relied_on() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    (given, guard) = joint(lambda x: x * 2, x)
    assert guard.fits(given)
    assert guard.fits([torch.zeros(4, 3, requires_grad=True)])
    assert not guard.fits([torch.ones(4, 3)])
    assert not guard.fits([torch.ones(5, 3, requires_grad=True)])
    assert not guard.fits([x.detach().double().requires_grad_()])
    assert not guard.fits([torch.ones(4, 3, requires_grad=True) * 1])
    assert not guard.fits([torch.ones(3, 4, requires_grad=True).t()])


def test_a_guard_for_symbolic_sizes() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() if x.shape[0] > y.shape[0] else y.sum()

    _, guard = joint(fn, torch.ones(5), torch.ones(4), dynamic=True)
    assert guard.fits([torch.ones(9), torch.ones(3)])
    assert not guard.fits([torch.ones(3), torch.ones(9)])


def test_shared_memory_matters_only_if_something_is_changed() -> None:
    def changes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    x = torch.ones(4)
    _, guard = joint(changes, torch.ones(2), torch.ones(2))
    assert not guard.fits([x[:2], x[2:].as_strided((2,), (1,), 0)])
    _, guard = joint(lambda x, y: x + y, torch.ones(2), torch.ones(2))
    assert guard.fits([x[:2], x[1:3]])


# on disk ------------------------------------------------------------------------------------------

COMPILES = """
import sys, torch
from torch._dynamo.utils import counters
from retrograd import aot

def fn(x, w):
    return (x @ w).sin().exp().sum()

dynamic = True if sys.argv[1] == "dynamic" else None
x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
compiled = aot.function(fn, backend="inductor", dynamic=dynamic)
compiled(x, w).backward()
assert torch.allclose(x.grad, torch.autograd.grad(fn(x, w), x)[0])
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], found["fxgraph_cache_bypass"])
"""


def compiled_in(folder: Path, sizes: str = "static") -> tuple[list[str], str]:
    """Misses, hits and bypasses of another process, and what it warned of."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    command = [sys.executable, "-c", COMPILES, sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["static", "dynamic"])
def test_another_process_finds_what_inductor_compiled(sizes: str, tmp_path: Path) -> None:
    assert compiled_in(tmp_path, sizes)[0] == ["2", "0", "0"]
    assert compiled_in(tmp_path, sizes)[0] == ["0", "2", "0"]


@pytest.mark.slow
def test_damaged_files_are_ignored(tmp_path: Path) -> None:
    compiled_in(tmp_path)
    pickles = [path for path in (tmp_path / "fxgraph").rglob("*") if path.is_file()]
    for path in pickles:
        path.write_bytes(b"no pickle")
    assert len(pickles) == 2
    assert compiled_in(tmp_path)[0][:2] == ["2", "0"]


@pytest.mark.slow
def test_a_folder_that_everybody_may_write_to_is_not_read(tmp_path: Path) -> None:
    compiled_in(tmp_path)
    tmp_path.chmod(0o777)
    found, warnings = compiled_in(tmp_path)
    assert found == ["0", "0", "0"]
    assert f"compiled graphs are not read from {tmp_path}: everybody may write to it" in warnings


@pytest.mark.parametrize(
    ("mode", "why"), [(0o700, None), (0o755, None), (0o777, "everybody may write to it")]
)
def test_whose_folder_is_trusted(mode: int, why: str | None, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    assert why_not_trusted(str(tmp_path)) == why


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    expected = None if owner == 0 else f"it belongs to user {owner}, not to this one ({owner + 1})"
    assert why_not_trusted(str(tmp_path)) == expected


def test_a_folder_that_is_not_there_is_not_trusted(tmp_path: Path) -> None:
    assert why_not_trusted(str(tmp_path / "absent")) == "it cannot be examined: No such file or directory"
