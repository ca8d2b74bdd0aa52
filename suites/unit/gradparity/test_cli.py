"""The command line: exit codes as pytest's, the table, `show` and `list`."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradparity import campaign
from gradparity.checks.registry import CHECKS, MEANINGS
from gradparity.cli import app
from gradparity.corpus.registry import corpus
from gradparity.subjects import registry as subjects
from gradparity.subjects.base import Blame, Subject

pytestmark = pytest.mark.programs

NAME = "autograd_function_db"
ENTRY = """
[[expected]]
subject = "{subject}"
case = "*"
verdict = "DIVERGE"
reason = "planted"
link = "https://example.org"
date = "2026-01-31"
"""


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


def run(*args: str) -> Result:
    return invoke("run", "--corpus", NAME, "-n", "0", "--device", "cpu", "--limit-per-corpus", "2", *args)


def test_0_when_all_agree_and_jsonl(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("--subject", "eager", "--json", str(out))
    assert result.exit_code == 0
    assert "2 cases run, 0 set aside, 0 divergences" in result.stdout
    assert [json.loads(line)["verdict"] for line in out.read_text().splitlines()] == ["AGREE", "AGREE"]


def test_1_for_an_unexpected_divergence_with_one_line_each() -> None:
    result = run("--subject", "planted:scale-grad")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("DIVERGE")]
    assert len(lines) == 2
    assert f"planted:scale-grad  {NAME}::" in lines[0]
    assert "grad-values-bits" in lines[0]


def test_0_when_the_divergence_is_expected_and_1_when_the_entry_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(ENTRY.format(subject="planted:*"))
    result = run("--subject", "planted:scale-grad", "--expected", str(path))
    assert (result.exit_code, "(expected)" in result.stdout) == (0, True)
    path.write_text(ENTRY.format(subject="*"))
    sample = run("--subject", "eager", "--expected", str(path))
    assert (sample.exit_code, "stale entry" in sample.stdout) == (0, False)
    whole = invoke("run", "--corpus", NAME, "-n", "0", "--subject", "eager", "--expected", str(path))
    assert (whole.exit_code, "stale entry" in whole.stdout) == (1, True)


FALLEN = """
[[fallback]]
subject = "falling"
cases = ["{case}"]
code = "why-not"
reason = "planted"
date = "2026-01-31"
"""


def test_a_fallback_fails_the_run_unless_the_file_lists_it(tmp_path: Path, monkeypatch) -> None:
    class Falling(Subject):
        accountable = True

        def notes(self) -> tuple[str, ...]:
            return ("fallback: [why-not] because",)

    monkeypatch.setitem(subjects.NAMED, "falling", Falling)
    path = tmp_path / "expected.toml"
    for case, code in (("*", 0), (f"{NAME}::nothing*", 1)):
        path.write_text(FALLEN.format(case=case))
        result = run("--subject", "falling", "--expected", str(path))
        assert (result.exit_code, result.stdout.count("unlisted fallback: falling")) == (code, 2 * code)
    assert run("--subject", "falling").exit_code == 0


def test_divergences_of_a_subject_that_is_not_accountable_are_results() -> None:
    result = run("--subject", "import:gradparity.subjects.planted:Wrong")
    assert (result.exit_code, "2 divergences, of which 0 unexpected" in result.stdout) == (0, True)


def test_2_when_interrupted(monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign.Corpora, "entries", interrupted)
    assert run("--subject", "eager").exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ("--subject", "nobody"),
        ("--subject", "eager", "--corpus", "nothing"),
        ("--subject", "eager", "--no-such-option"),
        ("--subject", "eager", "--timeout", "soon"),
        ("--subject", "eager", "--expected", "/no/such/file.toml"),
        (),
    ],
)
def test_4_for_usage_errors(args: tuple[str, ...]) -> None:
    assert run(*args).exit_code == 4
    assert invoke("no-such-command").exit_code == 4


def test_5_when_nothing_ran() -> None:
    assert run("--subject", "eager", "--match", "no such case").exit_code == 5


def test_a_glob_that_matches_nothing_is_told_with_names_like_it() -> None:
    for command in (run, lambda *words: invoke("list", "--corpus", NAME, *words[2:])):
        told = command("--subject", "eager", "--match", f"{NAME}::MulGenVmpAutogradFunction*").stderr
        assert "nothing matches: unknown case 'MulGenVmpAutogradFunction'" in told
        assert "did you mean  MulGenVmapAutogradFunction" in told
    assert "did you mean  reuse" in run("--subject", "eager", "--check", "reus").stderr
    assert "did you mean  op_db" in invoke("run", "-s", "eager", "-c", "opdb").stderr
    unknown = invoke("show", "scenarios::two_branches_tensor_hook", "-s", "eager").stderr
    assert "did you mean  two_branches_tensor_hooks" in unknown


def test_the_help_of_run_says_what_each_check_means() -> None:
    told = " ".join(invoke("run", "--help").stdout.split())
    assert all(f"{name}: {meaning}" in told for name, meaning in MEANINGS.items())
    assert MEANINGS.keys() == CHECKS.keys()


@pytest.mark.parametrize(
    ("policy", "code", "told"),
    [
        ((), 0, "of which 0 unexpected"),
        (("--only-stock-free",), 0, "of which 0 unexpected"),
        (("--strict",), 1, "of which 1 unexpected"),
    ],
)
def test_what_stock_shows_as_well_fails_only_a_strict_run(policy, code: int, told: str) -> None:
    words = ("run", "-n", "0", "--device", "cpu", "-c", "demo", "--match", "gradient_of_an_unused_output")
    for subject in ("inductor", "aot_eager"):
        result = invoke(*words, "--subject", subject, *policy)
        assert (result.exit_code, told in result.stdout) == (code, True), result.output


def test_show_prints_the_errors(in_this_process: None) -> None:
    case = f"{NAME}::{corpus(NAME).chunks()[0]}::0"
    result = invoke("show", case, "--subject", "planted:scale-grad", "--device", "cpu")
    assert result.exit_code == 0
    assert ">>" in result.stdout
    assert "DIVERGE" in result.stdout
    assert invoke("show", "nonsense", "--subject", "eager").exit_code == 4
    assert invoke("show", f"{case}99", "--subject", "eager").exit_code == 4


def test_list() -> None:
    names = invoke("list", "--corpus", NAME).stdout.split()
    assert names == [f"{NAME}::{chunk}" for chunk in corpus(NAME).chunks()]
    samples = invoke("list", "--corpus", NAME, "--samples", "--match", f"{NAME}::{corpus(NAME).chunks()[0]}")
    assert samples.stdout.split()[0].endswith("::0")
    assert "stock-ca:inductor" in invoke("list", "--subjects").stdout


def test_list_takes_what_one_of_several_globs_matches() -> None:
    first, second, *_ = corpus(NAME).chunks()
    listed = invoke("list", "--corpus", NAME, "--match", first, "--match", second).stdout.split()
    assert listed == [f"{NAME}::{first}", f"{NAME}::{second}"]


BACKEND = """
import torch

def right(gm, inputs):
    return gm.forward

def wrong(gm, inputs):
    return lambda *args: tuple(1.5 * one if torch.is_tensor(one) else one for one in gm(*args))
"""


@pytest.mark.parametrize("form", ["backend_of_mine", "./backend_of_mine.py"])
@pytest.mark.parametrize(("function", "code"), [("right", 0), ("wrong", 1)])
def test_a_backend_in_the_working_folder_answers_for_its_divergences(
    form: str, function: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backend_of_mine.py").write_text(BACKEND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("backend_of_mine", None)
    arguments = ["run", "-n", "0", "--device", "cpu", "--corpus", "op_db", "--match", "*::asin::*"]
    arguments += ["--limit-per-corpus", "2", "--subject", f"compile:{form}:{function}"]
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert f"of which {code} unexpected" in result.stdout
    path = tmp_path / "expected.toml"
    path.write_text(ENTRY.format(subject="compile:*"))
    assert invoke(*arguments, "--expected", str(path)).exit_code == 0


def test_a_backend_that_is_not_there_names_the_way_out() -> None:
    for name in ("compile:mine", "compile:no_such_module:f", "compile:./none.py:f", "compile:json:nothing"):
        result = run("--subject", name)
        assert result.exit_code == 4
        assert "compile:MODULE:FUNCTION" in result.stderr
        assert "error" not in result.stdout


def test_a_subject_of_ones_own_answers_unless_it_says_otherwise() -> None:
    assert subjects.resolve("import:gradparity.subjects.eager:Eager").accountable
    assert not subjects.resolve("import:gradparity.subjects.planted:Wrong").accountable
    assert not subjects.resolve("compile:aot_eager").accountable
    assert subjects.resolve("compile:inductor").accountable
    assert not subjects.resolve("compile:eager").accountable
    assert subjects.resolve("compile:eager", Blame.strict).accountable
