"""A campaign that was killed goes on where it was, and gives what one that ran through gives."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradparity.campaign import Campaign, Plan, run, units
from gradparity.cli import app
from gradparity.errors import SettingsError
from gradparity.shard import Shard
from gradparity.store.store import CaseDone, Entry, Progress, Store
from gradparity.verdict import Row
from unit.gradparity.killing import killed_after

pytestmark = pytest.mark.programs

NAME = "autograd_function_db"
PLAN = Plan(("eager", "planted:none-grad"), (NAME,), processes=0, limit_per_corpus=4)
SHOWN = ("case", "seed", "corpus", "subject", "verdict", "symptom", "reason", "signature")


class Interrupting:
    """A listener that interrupts after some rows."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, campaign: Campaign, entry: Entry | None) -> None:
        self._left -= isinstance(entry, CaseDone)
        if self._left == 0:
            raise KeyboardInterrupt


def shown(rows: list[Row]) -> list[tuple]:
    return sorted(tuple(getattr(row, name) for name in SHOWN) for row in rows)


def stored(path: Path, plan: Plan, *interrupting: Interrupting) -> Campaign:
    with Store(path) as store:
        return run(plan, None, *interrupting, progress=Progress.of(store, plan.campaign, plan.identity(), {}))


@pytest.fixture(scope="module")
def whole() -> Campaign:
    return run(PLAN)


@pytest.mark.parametrize("after", [1, 3, 7])
def test_after_an_interrupt_the_same_command_does_the_rest(
    tmp_path: Path, whole: Campaign, after: int
) -> None:
    path = tmp_path / "s.db"
    first = stored(path, PLAN, Interrupting(after))
    assert (first.ending.interrupted, first.exit_code, len(first.rows)) == (True, 2, after)
    second = stored(path, PLAN)
    assert shown(second.rows) == shown(whole.rows)
    assert (second.completed, second.exit_code) == (second.total, whole.exit_code)
    with Store(path) as store:
        assert len(store.runs()) == 1
        assert shown(store.rows()) == shown(whole.rows)


def test_a_campaign_that_is_over_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        stored(tmp_path / "s.db", PLAN)
    with Store(tmp_path / "s.db") as store:
        assert len(store.runs()) == 2


def test_shards_share_the_work_and_leave_nothing_out() -> None:
    plan = Plan(("eager",), ("op_db",))
    everything = [unit.payload["chunk"] for unit in units(plan)]
    parts = [
        [unit.payload["chunk"] for unit in units(Plan(("eager",), ("op_db",), shard=Shard(number, 3)))]
        for number in (1, 2, 3)
    ]
    assert sorted(chain(*parts)) == sorted(everything)
    assert min(map(len, parts)) > len(everything) // 5


def test_a_shard_is_the_same_everywhere() -> None:
    names = [f"op_db::{letter}" for letter in "abcdefgh"]
    assert [name[-1] for name in names if Shard.parse("2/3").takes(name)] == ["b", "e", "f", "g", "h"]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/3/4"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="form   i/n"):
        Shard.parse(text)


def test_a_full_disk_ends_the_campaign_with_all_rows_in_hand(tmp_path: Path, monkeypatch) -> None:
    with Store(tmp_path / "s.db") as store:
        progress = Progress.of(store, PLAN.campaign, PLAN.identity(), {})
        with open("/dev/full", "wb", buffering=0) as full:
            monkeypatch.setattr(store, "_file", full)
            result = run(PLAN, progress=progress)
            monkeypatch.undo()
    assert result.exit_code == 3
    assert "No space left" in result.ending.broken
    assert "it continues" in result.ending.broken
    assert len(result.ending.unwritten) == 1


def test_a_campaign_that_was_killed_gives_what_one_that_ran_through_gives(tmp_path: Path) -> None:
    """SIGKILL, in the middle."""
    path = tmp_path / "killed.db"
    words = ["run", "-s", "eager", "-s", "planted:none-grad", "-c", NAME, "--device", "cpu"]
    words += ["--limit-per-corpus", "4", "-n", "0", "--store", str(path)]
    killed_after(3, *words)
    with Store(path, create=False) as store:
        assert (len(store.rows()), [run.finished for run in store.runs()]) == (3, [None])
    whole = run(PLAN)
    again = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert (again.exit_code, "continues run" in again.stdout) == (whole.exit_code, True), again.stdout
    with Store(path) as store:
        assert len(store.runs()) == 1
        assert shown(store.rows()) == shown(whole.rows)


def test_cases_run_in_the_order_that_a_number_decides(whole: Campaign) -> None:
    campaigns = [run(replace(PLAN, shuffle=number)) for number in (1, 1, 2)]
    orders = [[row.case for row in campaign.rows] for campaign in campaigns]
    assert orders[0] == orders[1] != orders[2] != [row.case for row in whole.rows]
    assert all(sorted(order) == sorted(row.case for row in whole.rows) for order in orders)


def test_another_order_goes_on_where_the_first_was_interrupted(whole: Campaign, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    assert stored(path, replace(PLAN, shuffle=1), Interrupting(3)).ending.interrupted
    assert shown(stored(path, replace(PLAN, shuffle=2)).rows) == shown(whole.rows)
