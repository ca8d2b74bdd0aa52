"""The pytest plugin, in pytest processes of its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs

LOADED = any(point.name == "gradparity" for point in entry_points(group="pytest11"))

TESTS = """
import pytest, torch

def test_mine(gradparity):
    gradparity.check(torch.nn.Linear(3, 2), torch.randn(4, 3))

@pytest.mark.gradparity(subjects=["planted:none-grad"], seed=4)
def test_marked(gradparity):
    assert gradparity.seed == 4
    gradparity.check(lambda x: x * 2, torch.randn(3, requires_grad=True))

def test_without():
    assert True
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plugin = [] if LOADED else ["-p", "gradparity.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", *words]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ngradparity_subjects = eager, planted:last-bit\n")
    return tmp_path


def test_a_test_of_each_subject_the_header_and_rows_of_all_workers(folder: Path) -> None:
    done = run(folder, "-v", "-n", "2", "--gradparity-json", "rows.jsonl", "--gradparity-seed", "3")
    assert done.returncode == 1, done.stdout
    assert "subjects eager, planted:last-bit, device cpu, seed 3" in done.stdout
    for said in ("PASSED test_it.py::test_mine[eager]", "FAILED test_it.py::test_mine[planted:last-bit]"):
        assert said in done.stdout
    assert "DIVERGE: planted:none-grad and eager differ" in done.stdout
    assert "2 failed, 2 passed" in done.stdout
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["subject"] for row in rows) == ["eager", "planted:last-bit", "planted:none-grad"]
    assert list(folder.glob("*.part")) == []


def test_an_option_goes_before_the_setting_and_torch_is_imported_by_checks_only(folder: Path) -> None:
    (folder / "test_it.py").write_text(
        "import sys\n\ndef test_lazy():\n    assert 'torch' not in sys.modules\n\n"
        "def test_one(gradparity):\n    assert gradparity.subject == 'eager'\n"
    )
    done = run(folder, "--gradparity-subjects", "eager", "--gradparity-device", "cpu", "--strict-markers")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_test_that_fails_captures_nothing_of_torchs_trace_log(folder: Path) -> None:
    (folder / "test_it.py").write_text(
        "import torch\n\ndef test_hooks(gradparity):\n"
        "    layers = [torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)]\n"
        "    gradparity.check(torch.nn.Sequential(*layers), torch.randn(2, 3), hooks=True)\n"
    )
    done = run(folder, "--gradparity-subjects", "compile:aot_eager")
    assert (done.returncode, "HOOK_ORDER: compile:aot_eager" in done.stdout) == (1, True), done.stdout
    assert "torch.__trace" not in done.stdout


def test_a_seed_that_is_no_number_is_a_usage_error(folder: Path) -> None:
    done = run(folder, "--gradparity-seed", "many")
    assert done.returncode == 4
    assert "must be a number" in done.stderr + done.stdout
