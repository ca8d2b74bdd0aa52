"""Campaigns of generated programs: distinct finds, counts, ends, crashes, and the folder of finds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradparity.loop as campaigns
from gradparity.errors import CaseError, UnknownNameError
from gradparity.executors.registry import Resources, executor
from gradparity.executors.unit import Result, Unit
from gradparity.fuzz import Drawn, FuzzOptions, FuzzSummary, fuzz
from gradparity.fuzzing import work
from gradparity.fuzzing.find import Find, Folder
from gradparity.fuzzing.work import FuzzTask, fuzz_unit
from gradparity.generate.draw import drawn_and_run
from gradparity.generate.script import Script
from gradparity.signature import Signature
from gradparity.store.store import Entry
from gradparity.verdict import Row, Verdict


def campaign(subject: str, **options: object) -> FuzzSummary:
    made = {"processes": 0, "cases": 6, "policies": ("elementwise",), "shrink_seconds": 15.0} | options
    return fuzz(FuzzOptions(subject, **made), lambda state, entry: None)  # type: ignore[arg-type]


def test_eager_is_as_eager() -> None:
    summary = campaign("eager", cases=12, policies=("views", "hooks", "functions"))
    assert (summary.cases, summary.finds, summary.repeated, summary.lost) == (12, [], 0, [])
    assert summary.verdicts == {"AGREE": 12}
    assert len(summary.rows) == 12
    assert summary.rejected_share < 0.2
    assert summary.rate > 0


def test_one_defect_is_one_find_however_often_it_shows() -> None:
    summary = campaign("planted:scale-grad", cases=4, seed=2)
    found = summary.finds
    assert len(found) == 1
    assert summary.repeated == summary.verdicts["DIVERGE"] - 1 > 0
    assert found[0].signature.symptom == "grad-values-bits"
    assert found[0].row.is_find
    assert len(found[0].shrunk.source) < len(found[0].script.source)


def test_what_a_check_finds_is_shrunk_as_well() -> None:
    """Without the check the case agrees. What is left of the program still takes the memory."""
    summary = campaign("planted:memory-for-a-moment", cases=1, seed=2, checks=("memory",))
    (find,) = summary.finds
    assert (find.row.verdict, find.row.symptom, find.row.check) == (Verdict.MEMORY, "peak-memory", "memory")
    assert len(find.shrunk.source) < len(find.script.source)
    assert campaign("planted:memory-for-a-moment", cases=1, seed=2).verdicts == {"AGREE": 1}


def test_what_is_known_is_no_news() -> None:
    before = campaign("planted:scale-grad", cases=2, seed=1)
    (find,) = before.finds
    summary = campaign("planted:scale-grad", cases=2, seed=1, known=(find.signature,))
    assert (summary.finds, summary.repeated) == ([], before.verdicts["DIVERGE"])


def test_the_same_seed_finds_the_same() -> None:
    options = {"seed": 3, "cases": 2, "shrink_seconds": 0.0}
    one, two = (campaign("planted:none-grad", **options).finds for _ in range(2))
    assert one
    assert [(item.address, item.shrunk) for item in one] == [(item.address, item.shrunk) for item in two]


def test_policies_take_turns_and_seeds_do_not_meet() -> None:
    task = FuzzTask("eager", "cpu", 2, ("views", "hooks"), 0, 4, 1.0, 0.0)
    cases = [task.case(number) for number in range(4)]
    assert [case.name for case in cases] == ["views", "hooks", "views", "hooks"]
    assert [case.index for case in cases] == [2_000_000, 2_000_000, 2_000_001, 2_000_001]


def test_a_campaign_needs_an_end_and_names_that_exist() -> None:
    with pytest.raises(CaseError, match="minutes or cases"):
        campaign("eager", cases=None)
    with pytest.raises(UnknownNameError, match="unknown policy"):
        campaign("eager", policies=("nothing",))
    with pytest.raises(UnknownNameError, match=r"unknown torch.compile backend"):
        campaign("nobody")


def test_it_ends_after_its_minutes() -> None:
    summary = campaign("eager", cases=None, minutes=0.02)
    assert 0 < summary.cases < 500
    assert summary.seconds >= 1.2


def test_a_worker_hears_what_others_found_before_it_is_given_more() -> None:
    source = Drawn(FuzzOptions("planted:scale-grad", cases=30, processes=2, policies=("elementwise",)))
    units = next(source.rounds())
    assert [unit.payload["start"] for unit in units] == [0, 10, 20]
    assert [unit.payload["known"] for unit in units] == [[], [], []]
    messages = executor(fuzz_unit, 0, 10.0, Resources()).run([replace(units[0], payload=_quick(units[0]))])
    for message in messages:
        for entry in source.entries(message):
            source.count(entry)
    signatures = [find.signature.to_json() for find in source.summary.finds]
    assert signatures
    assert [unit.payload["known"] for unit in units] == [signatures] * 3


def _quick(unit: Unit) -> dict[str, Any]:
    return unit.payload | {"count": 4, "shrink_seconds": 0.0}


def test_shrinking_takes_a_part_of_the_time_that_is_left() -> None:
    task = FuzzTask("eager", "cpu", 0, ("views",), 0, 1, 1.0, 60.0)
    assert task.seconds() == 60.0
    assert 9 < replace(task, until=time.time() + 40).seconds() <= 10
    assert replace(task, until=time.time() - 1).seconds() == 0.0


def test_a_worker_draws_nothing_when_the_time_is_over() -> None:
    task = FuzzTask("eager", "cpu", 0, ("views",), 0, 3, 1.0, 60.0, until=time.time() - 1)
    sent: list[str] = []
    assert fuzz_unit(Unit(task.to_json(), 1.0), lambda kind, step, data: sent.append(kind))
    assert sent == []


def test_eager_runs_again_and_again_for_news_only(monkeypatch) -> None:
    asked: list[str] = []
    confirmed = work.confirmed

    def heard(program: Any, found: Any, device: Any) -> Any:
        asked.append(program.case.address)
        return confirmed(program, found, device)

    monkeypatch.setattr(work, "confirmed", heard)
    summary = campaign("planted:scale-grad", cases=4, seed=2)
    assert summary.verdicts["DIVERGE"] > len(asked) >= len(summary.finds) == 1


def test_workers_shrink_beside_one_another(monkeypatch) -> None:
    """A campaign of 100 seconds in which both workers shrank for 60 had 40 seconds for its cases, not -20."""

    class Shrinking:
        def run(self, units: list[Unit]) -> Iterator[Any]:
            for message in executor(fuzz_unit, 0, 10.0, Resources()).run(units):
                took = {"data": {**message.data, "shrinking": 60.0}} if isinstance(message, Result) else {}
                yield replace(message, **took)

    monkeypatch.setattr(campaigns, "executor", lambda *args: Shrinking())
    summary = campaign("eager", processes=2, cases=2)
    assert summary.shrinking == 60
    assert replace(summary, seconds=100.0).rate == 2 / 40


@pytest.mark.timeout(120)
def test_a_crash_costs_one_case() -> None:
    summary = campaign("planted:exit", processes=1, cases=2)
    assert (summary.cases, len(summary.lost), summary.finds) == (2, 2, [])
    assert "exit status 7" in summary.lost[0]
    assert "generated::elementwise::0" in summary.lost[0]


def test_a_case_that_cannot_be_drawn_costs_one_case(monkeypatch) -> None:
    def drawn(name: str, seed: int) -> object:
        return drawn_and_run(name, seed) if seed != 1 else 1 / 0

    monkeypatch.setattr(work, "drawn_and_run", drawn)
    summary = campaign("eager", cases=4)
    assert (summary.verdicts, summary.finds, summary.repeated) == ({"AGREE": 3, "CRASH": 1}, [], 0)
    assert summary.lost == [
        "generated::elementwise::1: ZeroDivisionError: division by zero, raised by drawn in test_fuzz.py"
    ]
    assert [row.symptom for row in summary.rows] == ["", "broken-case", "", ""]


@pytest.mark.timeout(120)
def test_workers_that_never_begin_end_the_campaign() -> None:
    with pytest.raises(CaseError, match=r"no case was judged: the worker held \d+ MiB, allowed 1 MiB"):
        campaign("eager", processes=1, cases=2, resources=Resources(memory=1 << 20))


def test_ctrl_c_ends_it_with_what_there_is() -> None:
    def interrupt(state: FuzzSummary, entry: Entry | None) -> None:
        if entry is not None:
            raise KeyboardInterrupt

    summary = fuzz(FuzzOptions("eager", cases=50, processes=0, policies=("views",)), interrupt)
    assert summary.ending.interrupted
    assert summary.cases < 50


def test_finds_are_kept_in_a_folder_and_read_again(tmp_path: Path) -> None:
    found = campaign("planted:scale-grad", cases=4).finds
    folder = Folder(tmp_path / "finds")
    assert folder.finds() == []
    file = folder.save(found[0])
    assert file.name == f"planted_scale-grad_{found[0].signature.digest}.json"
    assert folder.save(found[0]) == file
    assert folder.finds() == found


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"subject": 1}'])
def test_a_file_that_is_no_find_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(CaseError, match=r"bad\.json"):
        Folder(tmp_path).finds()


def test_a_find_travels_as_plain_data() -> None:
    row = Row("a::b", 0, "a", "s", Verdict.DIVERGE, "values", place="value")
    find = Find(
        "s", "a::b", 0, Script(), Script(doc="small"), Signature(Verdict.DIVERGE, "values"), row, 3, "2"
    )
    assert Find.from_json(json.loads(json.dumps(find.to_json()))) == find
