"""`gradparity fuzz` and `shrink`: finds become files; a killed campaign goes on; a case becomes smaller."""

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gradparity.cli import app
from gradparity.cli.fuzz import tell
from gradparity.corpus.folder import FolderCorpus
from gradparity.finds import recorded
from gradparity.fuzz import FuzzSummary
from gradparity.fuzzing.find import Folder
from gradparity.store.store import Store
from gradparity.verdict import Row, Verdict
from unit.gradparity.killing import killed_after

pytestmark = pytest.mark.programs

FUZZ = ("fuzz", "--device", "cpu", "--shrink-seconds", "15", "--policy", "views")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _workers(in_this_process: None) -> None: ...


@pytest.fixture(scope="module")
def finds(tmp_path_factory) -> Path:
    """What a short campaign against a planted fault leaves."""
    folder = tmp_path_factory.mktemp("fuzz") / "finds"
    words = ("-s", "planted:none-grad", "--cases", "5", "-n", "0", "--seed", "3", "--finds", str(folder))
    result = invoke(*FUZZ, *words, "--report", str(folder / "out.html"))
    assert (result.exit_code, "5 cases (" in result.stdout) == (1, True), result.stdout
    assert result.stdout.startswith(
        "planted:none-grad: programs of seed 3 for 5 cases, 0 workers; finds go to "
    )
    return folder


def test_a_find_is_kept_and_the_report_shows_it(finds: Path) -> None:
    files = list(finds.glob("planted_none-grad_*.json"))
    assert 0 < len(files) < 5
    assert f"{len(files)} distinct" in (finds / "out.html").read_text()
    assert {json.loads(file.read_text())["row"]["symptom"] for file in files} == {"grad-none"}


def test_a_folder_of_finds_is_a_corpus_and_can_be_replayed(finds: Path) -> None:
    names, rows = [*FolderCorpus(str(finds)).chunks()], recorded(finds)
    assert {row.case for row in rows} == {f"folder:{finds}::{name}" for name in names}
    result = invoke("replay", str(finds), "--device", "cpu")
    assert (result.exit_code, f"{len(names)} as before" in result.stdout) == (0, True)


def test_what_is_known_is_no_news(finds: Path) -> None:
    words = ("-s", "planted:none-grad", "--cases", "3", "-n", "0", "--seed", "2", "--finds", str(finds))
    result = invoke(*FUZZ, *words)
    assert (result.exit_code, "0 new, " in result.stdout) == (0, True), result.stdout


def test_usage_errors_are_4() -> None:
    assert invoke(*FUZZ, "-s", "nobody", "--cases", "1").exit_code == 4
    assert invoke("fuzz", "-s", "eager", "--cases", "1", "--policy", "luck").exit_code == 4


def test_a_file_that_is_not_there_is_a_usage_error_with_a_hint() -> None:
    result = invoke(*FUZZ, "-s", "mine.py", "--cases", "1")
    assert (result.exit_code, "compile:FILE.py:FUNCTION" in result.stderr) == (4, True), result.output


def test_a_find_is_told_before_it_is_made_smaller_and_the_ending_lists_it(tmp_path: Path) -> None:
    words = ("-s", "planted:none-grad", "--cases", "1", "-n", "0", "--seed", "3", "--finds", str(tmp_path))
    lines = invoke(*FUZZ, *words).stdout.splitlines()
    begun, kept = (
        next(place for place, line in enumerate(lines) if line.startswith(head))
        for head in ("found, being made smaller: DIVERGE", "DIVERGE")
    )
    assert begun < kept < lines.index("1 new divergences of 1 kind:")


def test_finds_that_look_alike_share_a_line_with_the_number_of_cases(finds: Path) -> None:
    (first, *_) = Folder(finds).finds()
    alike = [
        replace(first, signature=replace(first.signature, operators=names))
        for names in (("mul",), ("add", "sum"), ("exp",))
    ]
    other = replace(first, signature=replace(first.signature, place="grad b", operators=("cos",)))
    kinds = {first.signature.coarse.digest: 7, other.signature.coarse.digest: 9}
    console = Console(width=300, record=True, file=io.StringIO())
    tell(console, FuzzSummary(finds=[*alike, other], kinds=Counter(kinds)), Path("c.jsonl"))
    assert console.export_text().splitlines()[:3] == [
        "4 new divergences of 2 kinds:",
        f"     9 × {other.signature.describe()}  {first.address}  {other.name}",
        f"     7 × {alike[0].signature.describe()}  {first.address}  {alike[0].name}, "
        "and 2 programs like it: add sum, exp",
    ]


def test_cases_that_repeat_a_find_are_counted_with_it(tmp_path: Path) -> None:
    words = ("-s", "planted:none-grad", "--cases", "5", "-n", "0", "--seed", "3", "--finds", str(tmp_path))
    result = invoke(*FUZZ, *words)
    lines = [line for line in result.stdout.splitlines() if " × " in line]
    found = int(re.search(r"(\d+) new, (\d+) known", result.stdout)[1])
    known = int(re.search(r"(\d+) new, (\d+) known", result.stdout)[2])
    assert known
    assert sum(int(line.split()[0]) for line in lines) == found + known


def test_what_is_stocks_own_is_one_line_with_the_way_to_list_it() -> None:
    row = Row(
        "c",
        0,
        "generated",
        "compile:mine",
        Verdict.HOOK_ORDER,
        "hook-count",
        stage="aot_eager",
        stocks_own=True,
    )
    others = (
        replace(row, case="d"),
        replace(row, case="e", symptom="hook-order"),
        replace(row, stocks_own=False),
    )
    console = Console(width=200, record=True, file=io.StringIO())
    tell(console, FuzzSummary(rows=[row, *others]), Path("finds/campaign_1.jsonl"))
    assert console.export_text().splitlines()[0] == (
        "stock's own: 3 cases, 2 kinds, which aot_eager shows as well; to list them: "
        "gradparity report finds/campaign_1.jsonl"
    )


def test_a_killed_campaign_goes_on_and_judges_every_case_once(tmp_path: Path) -> None:
    words = [*FUZZ, "-s", "eager", "--cases", "9", "-n", "0", "--finds", str(tmp_path / "finds")]
    killed_after(4, *words)
    result = invoke(*words)
    assert (result.exit_code, "continues: 4 cases are judged" in result.stdout) == (0, True), result.stdout
    assert "9 cases (" in result.stdout
    (path,) = (tmp_path / "finds").glob("campaign_*.jsonl")
    lines = map(json.loads, path.read_text().splitlines())
    assert [line["step"] for line in lines if line.get("kind") == "case"] == list(range(9))


#: nothing is made smaller: what that comes to depends on the time that it gets.
OPTIONS = ("--cases", "3", "-n", "0", "--seed", "3", "--shrink-seconds", "0", "--finds")
STOPPED = (*FUZZ, "-s", "planted:none-grad", *OPTIONS)


class Killed(BaseException):
    """Ends a campaign as SIGKILL does: nothing is written any more."""


def result_of(folder: Path) -> tuple[int, str, list[str], list[str]]:
    """What a campaign leaves: exit code, last line without the time, finds, the cases of its report."""
    out = folder.parent / f"{folder.name}.jsonl"
    result = invoke(*STOPPED, str(folder), "--json", str(out))
    last = result.stdout.strip().splitlines()[-1]
    rows = [json.loads(line)["case"] for line in out.read_text().splitlines()]
    return (
        result.exit_code,
        last[last.index("%") :],
        [find.name for find in Folder(folder).finds()],
        sorted(rows),
    )


@pytest.mark.parametrize("after", ["the first case", "a find is saved", "a find is written"])
def test_one_that_was_killed_and_goes_on_leaves_what_one_that_ran_through_leaves(
    tmp_path: Path, monkeypatch, after: str
) -> None:
    whole = result_of(tmp_path / "whole")
    with monkeypatch.context() as patch:
        if after == "a find is saved":
            patch.setattr("gradparity.cli.fuzz.write_script", killed)
        elif after == "a find is written":
            patch.setattr(Folder, "save", killed)
        else:
            patch.setattr(FuzzSummary, "count", stopped_at(2, FuzzSummary.count))
        with pytest.raises(Killed):
            CliRunner().invoke(app, [*STOPPED, str(tmp_path / "killed")], catch_exceptions=False)
    assert result_of(tmp_path / "killed") == whole
    assert whole[0] == 1


def killed(*args: object) -> None:
    """Stands in for what does not happen any more."""
    raise Killed


def stopped_at(call: int, function):
    """The function, which is killed at this call."""
    calls = iter(range(1, call))

    def counted(*args):
        if next(calls, None) is None:
            raise Killed
        return function(*args)

    return counted


def test_a_find_that_cannot_be_written_is_shown(tmp_path: Path, monkeypatch) -> None:
    def full(self: Folder, find: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "save", full)
    result = invoke(*STOPPED, str(tmp_path / "finds"))
    assert (result.exit_code, "def run(p):" in result.stdout) == (3, True), result.stdout
    assert "cannot write the find above" in result.stderr


def store_of(finds: Path) -> Path:
    """The store of the campaign with seed 3; others may stand beside it."""
    return next(path for path in finds.glob("campaign_*.jsonl") if '"seed": 3' in path.read_text())


def test_the_store_of_a_campaign_can_be_reported(finds: Path) -> None:
    path = store_of(finds)
    with Store(path, create=False) as store:
        (run,) = store.runs()
    assert run.finished is not None
    result = invoke("report", str(path))
    assert (result.exit_code, "grad-none" in result.stdout) == (0, True), result.stdout


def test_a_store_of_another_campaign_is_one_error(finds: Path, tmp_path: Path) -> None:
    path = store_of(finds)
    copied = tmp_path / path.name
    lines = path.read_text().splitlines()[:3]
    copied.write_text(
        "\n".join([*lines[:2], lines[2].replace('"verdict": "DIVERGE"}', '"verdict": 3}')]) + "\n"
    )
    words = ("-s", "planted:none-grad", "--cases", "5", "-n", "0", "--seed", "3", "--finds", str(tmp_path))
    result = invoke(*FUZZ, *words)
    assert (result.exit_code, path.name in result.stderr) == (4, True), result.output


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke(*STOPPED, str(tmp_path / "file"))
    assert (result.exit_code, "another path" in result.stderr) == (3, True), result.output


@pytest.mark.parametrize("subject", ["compile:aot_eager", "inductor"])
def test_shrink_makes_a_case_smaller(tmp_path: Path, subject: str) -> None:
    """Also one that is stock's own: whoever names it wants it smaller."""
    words = ("shrink", "demo::gradient_of_an_unused_output", "-s", subject, "--device", "cpu")
    result = invoke(*words, "--out", str(tmp_path), "--seconds", "10")
    assert (result.exit_code, "lines became" in result.stdout) == (0, True), result.stdout
    (script,) = tmp_path.glob("repro_*.py")
    program = script.read_text().partition("# --- program")[2].partition("# --- recorder")[0]
    assert '"""' not in program
    assert invoke("shrink", "demo::hooks_of_two_branches", "-s", "eager", "--device", "cpu").exit_code == 5
