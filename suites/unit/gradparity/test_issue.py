"""Drafts of issues, and the sweep over versions of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradparity import sweep as sweep_module
from gradparity.errors import SweepError
from gradparity.issue.documentation import page
from gradparity.issue.markdown import Find, markdown, title
from gradparity.sweep import environment, said, sweep
from gradparity.verdict import Row, Verdict

ROW = Row(
    "demo::hooks",
    0,
    "demo",
    "compile:aot_eager",
    Verdict.HOOK_ORDER,
    "hook-order",
    "call 0: eager tensor b, subject tensor a",
    stage="aot_eager",
    operator="aten.mul.Tensor (backward)",
    exhibit={
        "timelines": {
            "eager": ["tensor b (1)", "tensor a (2)"],
            "subject": ["tensor a (2)", "tensor b (1)"],
            "differ": [0, 1],
        },
        "ablation": {
            "how": "hashes",
            "steps": [
                {"stage": "dynamo", "subject": "compile:eager", "verdict": "AGREE", "symptom": ""},
                {
                    "stage": "aot_eager",
                    "subject": "compile:aot_eager",
                    "verdict": "HOOK_ORDER",
                    "symptom": "hook-order",
                },
            ],
        },
        "errors": [
            {
                "what": "grad x",
                "dtype": "float32",
                "size": 1.0,
                "off": 0.5,
                "eager": 1e-7,
                "subject": 0.5,
                "allowed": 1e-5,
                "judged": "DIVERGE",
            }
        ],
        "raised": {"subject": "RuntimeError: no"},
    },
)


def draft(**more) -> str:
    return markdown(Find(ROW, "Eager calls b first.", "print('a script')", "PyTorch version: 2", **more))


def test_the_parts_are_those_of_pytorchs_form_with_a_part_for_a_person_first() -> None:
    heads = [line for line in draft().splitlines() if line.startswith("## ")]
    assert heads == [
        "## From the person who files this",
        "## 🐛 Describe the bug",
        "## Error logs",
        "## Versions",
    ]
    human = draft().partition("## 🐛")[0].partition("files this")[2]
    assert human.strip().startswith("<!--")
    assert human.strip().endswith("-->")


@pytest.mark.parametrize(
    "text",
    [
        "| dynamo | `compile:eager` | AGREE |  |",
        "First broken by: **aot_eager**, at `aten.mul.Tensor (backward)` (by hashes)",
        ">>   0  tensor b (1)",
        "!    1  tensor a (2)",
        "print('a script')",
        "subject: RuntimeError: no",
        "grad x: off eager by 0.5, error against float64 0.5 (eager's own 1e-07, allowed 1e-05)",
        "PyTorch version: 2",
        "notes/autograd.html#backward-hooks-execution",
        "made by gradparity",
        "Not swept.",
        "Eager calls b first.",
    ],
)
def test_it_says_what_a_maintainer_asks_for(text: str) -> None:
    assert text in draft()


def test_the_sweep_and_the_thread_stand_in_it() -> None:
    text = draft(sweep={"2.12.0": "differs", "2.13.0": "agrees"}, issue="https://example.org/1")
    assert "| 2.12.0 | differs |\n| 2.13.0 | agrees |" in text
    assert "https://example.org/1" in text


def test_the_title_names_subject_stage_and_operator() -> None:
    assert title(ROW).startswith("compile:aot_eager [aot_eager]: hook-order at aten.mul.Tensor")


@pytest.mark.parametrize(
    ("symptom", "anchor"),
    [
        ("grad-none", "torch.Tensor.grad.html"),
        ("grad-values-bits", "numerical_accuracy"),
        ("grad-dtype", "how-autograd-encodes"),
        ("state-version", "in-place-correctness"),
        ("raises RuntimeError", "torch.compile.html"),
    ],
)
def test_each_symptom_has_its_page(symptom: str, anchor: str) -> None:
    assert anchor in page(Row("c::n", 0, "c", "s", Verdict.DIVERGE, symptom)).address


SCRIPTS = {"import sys; sys.exit(0)": "agrees", "print('order'); raise SystemExit(1)": "differs: order"}


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """A folder in which "9.9" is this Python."""
    home = tmp_path / "torch" / "9.9"
    (home / "bin").mkdir(parents=True)
    os.symlink(sys.executable, home / "bin" / "python")
    (home / "complete").write_text("9.9")
    return home.parent


@pytest.mark.parametrize("source", SCRIPTS)
def test_a_script_is_asked_in_the_environment_that_is_there(
    tmp_path: Path, environments: Path, source: str
) -> None:
    script = tmp_path / "repro.py"
    script.write_text(source)
    told: list[str] = []
    assert dict(sweep(script, ["9.9"], environments, told.append)) == {"9.9": SCRIPTS[source]}
    assert told == []


def test_a_script_that_fails_otherwise_says_how(tmp_path: Path) -> None:
    script = tmp_path / "repro.py"
    script.write_text("raise KeyError('gone')")
    assert said(Path(sys.executable), script) == "fails: KeyError: 'gone'"


def test_a_version_that_cannot_be_installed_is_told_and_passed_over(tmp_path: Path, monkeypatch) -> None:
    def refused(command: list[str]) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="ERROR: no matching distribution")

    monkeypatch.setattr(sweep_module, "_run", refused)
    script = tmp_path / "repro.py"
    script.write_text("")
    told: list[str] = []
    (answer,) = sweep(script, ["0.0.1"], tmp_path / "torch", told.append)
    assert answer[1] == "not tried: cannot install torch 0.0.1: ERROR: no matching distribution"
    assert "may load several GB" in told[0]
    with pytest.raises(SweepError, match=r"pip install torch==0\.0\.1"):
        environment("0.0.1", tmp_path / "torch", told.append)
