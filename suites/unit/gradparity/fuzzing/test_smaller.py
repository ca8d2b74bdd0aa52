"""Making a find smaller: a candidate that ends its worker costs itself only, and is told."""

from __future__ import annotations

from functools import partial

import pytest

from gradparity import finds, loop
from gradparity.case import Case
from gradparity.executors.unit import Lost, Message, Result, RunUnit, Started, Unit
from gradparity.fuzz import Drawn, FuzzOptions, FuzzSummary, fuzz
from gradparity.fuzzing import work
from gradparity.fuzzing.find import Find
from gradparity.fuzzing.smaller import Effort, smaller_unit
from gradparity.fuzzing.work import fuzz_unit
from gradparity.generate.draw import drawn_and_run
from gradparity.verdict import Row, Verdict
from gradparity.work import Task

EFFORT = Effort("cpu", timeout=20.0, seconds=60.0)


def campaign() -> FuzzSummary:
    options = FuzzOptions(
        "planted:scale-grad", seed=2, cases=1, processes=0, policies=("elementwise",), shrink_seconds=15.0
    )
    return fuzz(options, lambda state, entry: None)


@pytest.fixture(scope="module")
def whole() -> Find:
    """What the campaign finds where nothing ends a worker."""
    (find,) = campaign().finds
    return find


class Ended(BaseException):
    """Ends what a worker does, as if the process had died."""


class Mortal:
    """An executor whose worker dies at one announced candidate."""

    def __init__(self, at: int, run_unit: RunUnit = fuzz_unit) -> None:
        self.at, self.run_unit, self.announced = at, run_unit, 0

    def run(self, units):
        for unit in units:
            said: list[Message] = []
            try:
                self.run_unit(unit, partial(self.emit, unit, said))
            except Ended:
                said.append(Lost(unit, said[-1].step, said[-1].label, "crash", "exit status 7"))  # type: ignore[union-attr]
            yield from said

    def emit(self, unit: Unit, said: list[Message], kind: str, step: int, data: dict) -> None:
        said.append(Started(unit, step, data) if kind == "start" else Result(unit, step, data))
        self.announced += "begun" in data
        if "begun" in data and self.announced == self.at:
            raise Ended


@pytest.mark.xdist_group("smaller")
@pytest.mark.parametrize("at", [1, 3, 20])
def test_a_candidate_that_ends_its_worker_costs_that_candidate_only(whole, monkeypatch, at: int) -> None:
    mortal = Mortal(at)
    monkeypatch.setattr(loop, "executor", lambda *more: mortal)
    summary = campaign()
    (find,) = summary.finds
    assert summary.lost == [f"{find.address}, while it was made smaller: exit status 7"]
    assert (summary.cases, len(summary.rows)) == (1, 1)
    assert find.signature.coarse == whole.signature.coarse
    assert abs(len(find.shrunk.source) - len(whole.shrunk.source)) < 60
    assert len(find.shrunk.source) < len(find.script.source) / 2


def test_what_is_made_smaller_when_time_is_up_is_kept_as_far_as_it_came(monkeypatch) -> None:
    """The time is up when the other worker's case is judged; this one's worker ends with its round."""
    over = iter([False, False, True])
    monkeypatch.setattr(Drawn, "is_over", lambda *more: next(over, True))
    mortal = Mortal(20)
    monkeypatch.setattr(loop, "executor", lambda *more: mortal)
    summary = campaign()
    (find,) = summary.finds
    assert (summary.cases, find.tried > 10, mortal.announced < 26) == (1, True, True)
    assert len(find.shrunk.source) < len(find.script.source)


def test_a_find_that_cannot_be_run_again_stays_as_it_was_drawn(monkeypatch) -> None:
    mortal = Mortal(2)
    monkeypatch.setattr(loop, "executor", lambda *more: mortal)
    monkeypatch.setattr(work, "drawn_and_run", dying_the_second_time())
    summary = campaign()
    (find,) = summary.finds
    assert find.shrunk == find.script
    assert summary.lost[1:] == [f"{find.address}: exit status 7"]
    assert summary.verdicts == {"DIVERGE": 1}


def dying_the_second_time():
    drawn: list[int] = []

    def draw(name: str, seed: int) -> object:
        drawn.append(seed)
        if len(drawn) == 2:
            raise Ended
        return drawn_and_run(name, seed)

    return draw


def one(subject: str) -> Task:
    return Task.of(Case("generated", "elementwise", 2_000_000), subject, "cpu")


@pytest.mark.parametrize("at", [1, 3, 20])
def test_one_case_is_made_smaller_in_spite_of_a_candidate_that_ends_its_worker(monkeypatch, at: int) -> None:
    mortal = Mortal(at, smaller_unit)
    monkeypatch.setattr(finds, "executor", lambda *more: mortal)
    told: list[str] = []
    made = finds.smaller(one("planted:scale-grad"), EFFORT, told.append)
    assert not isinstance(made, Row)
    find, done = made
    assert (told, done) == (["a candidate cost its worker, and is left out: exit status 7"], True)
    assert len(find.shrunk.source) < len(find.script.source) / 2


@pytest.mark.timeout(120)
def test_a_case_that_ends_its_worker_is_told_and_not_cut() -> None:
    made = finds.smaller(one("planted:exit"), EFFORT, lambda text: None)
    assert isinstance(made, Row)
    assert (made.verdict, made.symptom) == (Verdict.CRASH, "crash")
    assert "exit status 7" in made.reason
