"""Drafts of issues, and the sweep over versions of torch."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradparity import sweep as sweep_module
from gradparity.errors import SweepError
from gradparity.issue.documentation import page
from gradparity.issue.markdown import Find, markdown, title
from gradparity.sweep import VERSIONS, at_hand, environment, said, sweep
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
            "stage": "aot_eager",
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
    return markdown(
        Find(
            ROW, "Eager calls b first.", "print('a script')", "PyTorch version: 2", versions=VERSIONS, **more
        )
    )


FIELDS = ("Describe the bug", "Error logs", "Versions")
"""The required fields of PyTorch's form for bugs of torch.compile (`pt2-bug-report.yml`), in its order."""


def test_the_parts_are_those_of_pytorchs_form_with_one_for_a_person_last() -> None:
    heads = [line.removeprefix("## ") for line in draft().splitlines() if line.startswith("## ")]
    assert heads == ["🐛 Describe the bug", *FIELDS[1:], "From the person who files this"]
    human = draft().partition("files this")[2].partition("---")[0]
    assert human.strip().startswith("<!--")


def test_the_program_comes_first_then_what_was_seen() -> None:
    told = draft(sweep={"2.13.0": "differs"})
    order = ["```python\nprint('a script')", "**Seen** under", "**Expected**", "### Ablation"]
    order += ["### Versions of torch", "### Against float64", "### Hook timelines", "## Error logs"]
    places = [told.index(text) for text in order]
    assert places == sorted(places)
    assert "gradparity" not in told.partition("\n---\n")[0]


def test_triage_finds_the_program_the_stage_and_the_versions() -> None:
    """Triage of torch.compile asks for a program that runs as it is, the first backend that breaks it, and
    the output of `collect_env`.
    """
    told = draft()
    program = told.partition("```python\n")[2].partition("```")[0]
    compile(program, "draft", "exec")
    assert "First broken by: **aot_eager**" in told
    assert "PyTorch version" in told.partition("## Versions")[2]


@pytest.mark.parametrize(
    "text",
    [
        "| dynamo | `compile:eager` | AGREE |  |",
        "First broken by: **aot_eager**, at `aten.mul.Tensor (backward)` (by hashes)",
        ">>   0  tensor b (1)",
        "!    1  tensor a (2)",
        "print('a script')",
        "subject: RuntimeError: no",
        "| grad x | float32 | 0.5 | 1e-07 | 0.5 | 1e-05 |",
        "PyTorch version: 2",
        "notes/autograd.html#backward-hooks-execution",
        "made by gradparity",
        "Not tried: 2.9.1, 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0.",
        "Eager calls b first.",
    ],
)
def test_it_says_what_a_maintainer_asks_for(text: str) -> None:
    assert text in draft()


def test_the_sweep_and_the_thread_stand_in_it() -> None:
    text = draft(sweep={"2.12.0": "differs", "2.13.0+cpu (here)": "agrees"}, issue="https://example.org/1")
    assert "| 2.12.0 | differs |\n| 2.13.0+cpu (here) | agrees |" in text
    assert "Not tried: 2.9.1, 2.11.0, 2.12.1, 2.14.1, 2.15.0." in text
    assert "https://example.org/1" in text


def test_the_title_names_subject_stage_and_operator() -> None:
    """The stage only where the subject's name does not say it."""
    assert title(ROW).startswith("compile:aot_eager: hook-order at aten.mul.Tensor")
    assert title(replace(ROW, subject="compile:inductor")).startswith("compile:inductor [aot_eager]: hook")


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


def test_the_text_of_a_backends_file_stands_in_it() -> None:
    told = draft(backend=("mine.py", "def f(gm, inputs):\n    return gm\n"))
    assert "### The backend\n\n`mine.py` defines it. Put it beside the script:\n\n```python\ndef f(" in told
    told = draft(backend=("mine.py", "import one, two\n", "one.py", "two.py"))
    assert "`mine.py` defines it. It imports `one.py`, `two.py`: attach that, too. Put it beside" in told
    assert "`mine.py` defines it. It has 200 lines: attach it." in draft(backend=("mine.py", "a\n" * 200))


def test_an_ablation_that_found_no_stage_blames_none() -> None:
    steps = {**ROW.exhibit["ablation"], "stage": ""}
    row = replace(ROW, operator="", exhibit={**ROW.exhibit, "ablation": steps})
    told = markdown(Find(row, "", "", ""))
    assert "First broken" not in told
    assert "No stage differed when it ran again, alone." in told


def test_a_program_that_needs_the_recorder_names_its_script() -> None:
    assert "the attached repro_1.py has both" in draft(attached="repro_1.py")


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


def test_versions_at_hand_are_those_whose_environment_is_complete(environments: Path) -> None:
    (environments / "2.13.0").mkdir()
    (environments / "2.15.0").mkdir()
    (environments / "2.15.0" / "complete").write_text("2.15.0")
    assert at_hand(environments) == ["2.15.0"]


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
