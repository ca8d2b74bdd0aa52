"""A campaign that was killed goes on where it was, and gives what one that ran through gives."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from gradparity.campaign import Campaign, Plan, run, units
from gradparity.errors import SettingsError, StoreFullError
from gradparity.journal import Journal
from gradparity.shard import Shard
from gradparity.store.store import Store
from gradparity.verdict import Row

NAME = "autograd_function_db"
PLAN = Plan(("eager", "planted:none-grad"), (NAME,), processes=0, limit_per_corpus=4)
SHOWN = ("case", "seed", "corpus", "subject", "verdict", "symptom", "reason", "signature")


class Listener:
    """Counts, and may interrupt after some rows."""

    def __init__(self, interrupt_after: int | None = None, error: BaseException | None = None) -> None:
        self.rows = self.done = 0
        self._after, self._error = interrupt_after, error or KeyboardInterrupt()

    def units(self, total: int) -> None:
        self.total = total

    def unit_done(self) -> None:
        self.done += 1

    def row(self, row: Row) -> None:
        self.rows += 1
        if self.rows == self._after:
            raise self._error


def shown(rows: list[Row]) -> list[tuple]:
    return sorted(tuple(getattr(row, name) for name in SHOWN) for row in rows)


def stored(path: Path, plan: Plan, listener: Listener) -> Campaign:
    with Store(path) as store:
        return run(plan, None, listener, Journal(store, plan.campaign, plan.identity(), {}))


@pytest.fixture(scope="module")
def whole() -> Campaign:
    return run(PLAN, None, Listener())


@pytest.mark.parametrize("after", [1, 3, 7])
def test_after_an_interrupt_the_same_command_does_the_rest(
    tmp_path: Path, whole: Campaign, after: int
) -> None:
    path = tmp_path / "s.db"
    first = stored(path, PLAN, Listener(after))
    assert (first.interrupted, first.exit_code) == (True, 2)
    listener = Listener()
    second = stored(path, PLAN, listener)
    assert shown(second.rows) == shown(whole.rows)
    assert (listener.done, second.exit_code) == (listener.total, whole.exit_code)
    with Store(path) as store:
        assert len(store.runs()) == 1
        assert shown(store.rows()) == shown(whole.rows)


def test_a_campaign_that_is_over_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        stored(tmp_path / "s.db", PLAN, Listener())
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
    def full(self: Store) -> None:
        if self._waiting:
            raise StoreFullError("cannot write: no space left")

    with Store(tmp_path / "s.db") as store:
        journal = Journal(store, PLAN.campaign, PLAN.identity(), {})
        monkeypatch.setattr(Store, "flush", full)
        result = run(PLAN, None, Listener(), journal)
        store._waiting.clear()
    assert result.exit_code == 3
    assert "no space left" in result.broken
    assert shown(result.unwritten) == shown(result.rows)
    assert result.rows


KILLED = Plan(("eager", "planted:none-grad"), (NAME,))


def command(path: Path, processes: int) -> list[str]:
    words = ["run", "-s", "eager", "-s", "planted:none-grad", "-c", NAME, "--device", "cpu"]
    return [sys.executable, "-m", "gradparity", *words, "-n", str(processes), "--store", str(path)]


def count(path: Path) -> int:
    if not path.exists():
        return 0
    with Store(path) as store:
        return len(store.rows())


def test_a_campaign_that_was_killed_gives_what_one_that_ran_through_gives(tmp_path: Path) -> None:
    """SIGKILL to the controller, in the middle; its worker ends by itself when the pipe breaks."""
    whole = run(replace(KILLED, processes=0), None, Listener())
    path, settings = tmp_path / "killed.db", {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command(path, 1), stdout=subprocess.DEVNULL, env=settings)
    until = time.monotonic() + 60
    while count(path) < 5 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 5 <= count(path) < len(whole.rows)
    again = subprocess.run(command(path, 0), capture_output=True, text=True, env=settings, check=False)
    assert (again.returncode, "goes on with run" in again.stdout) == (whole.exit_code, True), again.stdout
    with Store(path) as store:
        assert len(store.runs()) == 1
        assert shown(store.rows()) == shown(whole.rows)


def test_cases_run_in_the_order_that_a_number_decides(whole: Campaign) -> None:
    campaigns = [run(replace(PLAN, shuffle=number), None, Listener()) for number in (1, 1, 2)]
    orders = [[row.case for row in campaign.rows] for campaign in campaigns]
    assert orders[0] == orders[1] != orders[2] != [row.case for row in whole.rows]
    assert all(sorted(order) == sorted(row.case for row in whole.rows) for order in orders)


def test_another_order_goes_on_where_the_first_was_interrupted(whole: Campaign, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    assert stored(path, replace(PLAN, shuffle=1), Listener(interrupt_after=3)).interrupted
    again = Listener()
    assert shown(stored(path, replace(PLAN, shuffle=2), again).rows) == shown(whole.rows)
