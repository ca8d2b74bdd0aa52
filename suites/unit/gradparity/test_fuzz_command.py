"""`gradparity fuzz` and `shrink`: finds become files; a killed campaign goes on; a case becomes smaller."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradparity.case import Case
from gradparity.cli import app
from gradparity.corpus.folder import FolderCorpus
from gradparity.errors import StoreError, StoreFullError
from gradparity.finds import recorded
from gradparity.fuzz import FuzzSummary
from gradparity.fuzzing.diary import Diary, read
from gradparity.fuzzing.find import Folder
from gradparity.verdict import Verdict, row_of

FUZZ = ("fuzz", "--device", "cpu", "--shrink-seconds", "15", "--policy", "views")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def finds(tmp_path_factory) -> Path:
    """What a short campaign against a planted fault leaves."""
    folder = tmp_path_factory.mktemp("fuzz") / "finds"
    words = ("-s", "planted:none-grad", "--cases", "5", "-n", "0", "--seed", "3", "--finds", str(folder))
    result = invoke(*FUZZ, *words, "--report", str(folder / "out.html"))
    assert (result.exit_code, "5 cases (" in result.stdout) == (1, True), result.stdout
    return folder


def test_a_find_is_kept_and_the_report_shows_it(finds: Path) -> None:
    files = list(finds.glob("planted_none-grad_*.json"))
    assert len(files) == 2
    assert "2 distinct" in (finds / "out.html").read_text()
    assert {json.loads(file.read_text())["row"]["symptom"] for file in files} == {"grad-none"}


def test_a_folder_of_finds_is_a_corpus_and_can_be_replayed(finds: Path) -> None:
    names, rows = [*FolderCorpus(str(finds)).chunks()], recorded(finds)
    assert {row.case for row in rows} == {f"folder:{finds}::{name}" for name in names}
    result = invoke("replay", str(finds), "--device", "cpu")
    assert (result.exit_code, "2 as before" in result.stdout) == (0, True)


def test_what_is_known_is_no_news(finds: Path) -> None:
    words = ("-s", "planted:none-grad", "--cases", "3", "-n", "0", "--seed", "2", "--finds", str(finds))
    result = invoke(*FUZZ, *words)
    assert (result.exit_code, "0 new, " in result.stdout) == (0, True), result.stdout


def test_usage_errors_are_4() -> None:
    assert invoke(*FUZZ, "-s", "nobody", "--cases", "1").exit_code == 4
    assert invoke("fuzz", "-s", "eager", "--cases", "1", "--policy", "luck").exit_code == 4


def judged(folder: Path) -> list[int]:
    """The numbers of the cases that the diary holds."""
    files = list(folder.glob("campaign_*.jsonl"))
    lines = files[0].read_text().splitlines()[1:] if files else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [line["number"] for line in found if "number" in line]


def test_a_killed_campaign_goes_on_and_judges_every_case_once(tmp_path: Path) -> None:
    folder = tmp_path / "finds"
    words = [*FUZZ, "-s", "eager", "--cases", "40", "-n", "0", "--finds", str(folder)]
    settings = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gradparity", *words], stdout=subprocess.DEVNULL, env=settings
    )
    until = time.monotonic() + 60
    while len(judged(folder)) < 6 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(judged(folder))
    assert 6 <= before < 40
    result = invoke(*words)
    assert (result.exit_code, f"goes on: {before} cases" in result.stdout) == (0, True), result.stdout
    assert sorted(judged(folder)) == list(range(40))


STOPPED = (*FUZZ, "-s", "planted:none-grad", "--cases", "5", "-n", "0", "--seed", "3", "--finds")


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


@pytest.mark.parametrize("after", ["the first case", "a find is saved", "a find is noted"])
def test_one_that_was_killed_and_goes_on_leaves_what_one_that_ran_through_leaves(
    tmp_path: Path, monkeypatch, after: str
) -> None:
    whole = result_of(tmp_path / "whole")
    with monkeypatch.context() as patch:
        if after == "a find is saved":
            patch.setattr("gradparity.cli.fuzz.write_script", killed)
        elif after == "a find is noted":
            patch.setattr(Folder, "save", killed)
        else:
            patch.setattr(FuzzSummary, "state", stopped_at(2, FuzzSummary.state))
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


CAMPAIGN = {"subject": "s"}
STATE = {"cases": 1, "seconds": 1.0}
ROW = row_of(Case("generated", "views", 1), "s", Verdict.AGREE)


class TestDiary:
    def test_it_remembers_until_the_campaign_ends(self, tmp_path: Path) -> None:
        diary = Diary(tmp_path, CAMPAIGN)
        diary.find(replace(ROW, signature="a"))
        diary.note(3, STATE, ROW)
        diary.note(4, STATE | {"cases": 2})
        diary.find(replace(ROW, signature="b"))
        done = Diary(tmp_path, CAMPAIGN).done
        assert (done.numbers, done.state, done.pending) == ({3, 4}, STATE | {"cases": 2}, {"b"})
        assert [row.signature for row in done.rows] == ["a", ""]
        diary.end()
        assert Diary(tmp_path, CAMPAIGN).done.numbers == set()
        assert Diary(tmp_path, {"subject": "other"}).path != diary.path

    def test_it_may_be_killed_before_the_first_case(self, tmp_path: Path) -> None:
        for _ in range(3):
            diary = Diary(tmp_path, CAMPAIGN)
        diary.note(0, STATE)
        assert read(diary.path).numbers == {0}

    def test_a_line_that_was_cut_short_is_cut_off(self, tmp_path: Path) -> None:
        diary = Diary(tmp_path, CAMPAIGN)
        diary.note(3, STATE)
        with diary.path.open("a") as file:
            file.write('{"number": 4, "sta')
        again = Diary(tmp_path, CAMPAIGN)
        again.note(5, STATE)
        assert read(diary.path).numbers == {3, 5}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("cats\n", "is no line of a campaign"),
            ('{"format": "gradparity fuzz", "version": 9}\n', "another version"),
        ],
    )
    def test_a_file_that_is_none_says_so(self, tmp_path: Path, text: str, said: str) -> None:
        path = Diary(tmp_path, CAMPAIGN).path
        path.write_text(text)
        with pytest.raises(StoreError, match=said):
            Diary(tmp_path, CAMPAIGN)

    def test_a_full_disk_is_told(self, tmp_path: Path) -> None:
        diary = Diary(tmp_path, CAMPAIGN)
        diary._file = open("/dev/full", "w")  # noqa: SIM115
        with pytest.raises(StoreFullError, match="it goes on"):
            diary.note(1, STATE)

    def test_a_folder_that_cannot_be_made_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreFullError, match="another --finds"):
            Diary(tmp_path / "file", CAMPAIGN)


def test_shrink_makes_a_case_smaller(tmp_path: Path) -> None:
    words = ("shrink", "demo::gradient_of_an_unused_output", "-s", "compile:aot_eager", "--device", "cpu")
    result = invoke(*words, "--out", str(tmp_path), "--seconds", "10")
    assert (result.exit_code, "lines became" in result.stdout) == (0, True), result.stdout
    (script,) = tmp_path.glob("repro_*.py")
    program = script.read_text().partition("# --- program")[2].partition("# --- recorder")[0]
    assert '"""' not in program
    assert invoke("shrink", "demo::hooks_of_two_branches", "-s", "eager", "--device", "cpu").exit_code == 5
