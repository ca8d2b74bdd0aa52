"""The store: rows come back, also after a crash; a file that is no store, or a full disk, is told clearly."""

import json
import sqlite3
import threading
from pathlib import Path

import pytest

from gradparity.errors import StoreError, StoreFullError
from gradparity.store import schema
from gradparity.store.lines import read_lines, write_lines
from gradparity.store.merge import merge
from gradparity.store.store import Run, Store
from gradparity.verdict import Row, Verdict

VERSIONS = {"torch": "2"}


def row(number: int, verdict: Verdict = Verdict.AGREE) -> Row:
    return Row(f"c::n::{number}", 0, "c", "s", verdict, exhibit={"errors": []})


def filled(path: Path, shard: str | None = None, *numbers: int, campaign: str = "digest") -> Run:
    with Store(path) as store:
        run, _ = store.begin(campaign, {"shard": shard}, VERSIONS)
        for number in numbers:
            store.add(run.id, f"unit {number}", 0, row(number))
        store.finish(run.id)
        return store.runs()[-1]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    run = filled(path, None, 2, 1)
    with Store(path, create=False) as store:
        assert store.rows(run.id) == [row(1), row(2)]
        assert store.rows()[0].exhibit == {"errors": []}
        assert store.runs() == [run]
        assert run.finished is not None


def test_what_is_written_twice_is_there_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        run, _ = store.begin("digest", {}, VERSIONS)
        for _ in range(2):
            store.add(run.id, "unit", 0, row(0))
        store.flush()
        assert len(store.rows()) == 1


def test_a_finding_is_on_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = Store(path)
    run, _ = store.begin("digest", {}, VERSIONS)
    store.add(run.id, "unit", 0, row(0))
    with Store(path, create=False) as other:
        assert other.rows() == []  # an agreement waits a moment
        store.add(run.id, "unit", 1, row(1, Verdict.DIVERGE))
        assert len(other.rows()) == 2


def test_an_unfinished_run_goes_on_and_a_finished_one_does_not(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        first, continued = store.begin("digest", {"seed": 0}, VERSIONS)
        assert not continued
        assert store.begin("digest", {"seed": 0}, VERSIONS) == (first, True)
        assert store.begin("digest", {"seed": 1}, VERSIONS)[1] is False
        store.finish(first.id)
        assert store.begin("digest", {"seed": 0}, VERSIONS)[1] is False


def test_a_run_of_another_torch_does_not_go_on(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.begin("digest", {}, {"torch": "1"})
        assert store.begin("digest", {}, {"torch": "2"})[1] is False


def garbage(path: Path) -> None:
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 40)


def torn(path: Path) -> None:
    filled(path, None, 1)
    path.write_bytes(path.read_bytes()[:5000])


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")


def newer(path: Path) -> None:
    filled(path, None, 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'version'")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (garbage, "is damaged"),
        (torn, "is damaged"),
        (foreign, "no store of gradparity"),
        (newer, "version 99 of the format"),
    ],
)
def test_a_file_that_is_no_store_says_so_and_what_to_do(tmp_path: Path, spoil, said: str) -> None:
    path = tmp_path / "s.db"
    spoil(path)
    with pytest.raises(StoreError, match=said) as caught, Store(path) as store:
        store.rows()
    assert "try " in str(caught.value)


def test_a_store_that_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store(tmp_path / "s.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_was_killed_while_it_was_made_is_none_yet(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "s.db"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "TABLES", schema.TABLES.replace("CREATE TABLE units", "CREATE NONSENSE"))
        with pytest.raises(StoreError):
            Store(path)
    assert path.exists()
    filled(path, None, 1)
    with Store(path, create=False) as store:
        assert store.rows() == [row(1)]


def test_of_two_that_make_a_store_the_second_waits_and_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    first = sqlite3.connect(path)
    first.execute("BEGIN IMMEDIATE")
    for statement in filter(str.strip, schema.TABLES.split(";")):
        first.execute(statement)
    first.executemany(
        "INSERT INTO meta VALUES (?, ?)", [("format", schema.FORMAT), ("version", schema.VERSION)]
    )
    stores: list[Run] = []
    second = threading.Thread(target=lambda: stores.append(filled(path, None, 1)))
    second.start()
    second.join(0.3)
    assert stores == []
    first.commit()
    first.close()
    second.join()
    assert len(stores) == 1


def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        run, _ = store.begin("digest", {}, VERSIONS)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreFullError, match="no space left"):
            add_many(store, run)
        written = len(store.rows())
        assert [item.case for item in store.unwritten] == [f"c::n::{written}"]


def test_a_store_in_use_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(schema, "BUSY", 0.1)
    path = tmp_path / "s.db"
    filled(path, None, 1)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StoreError, match="in use by another process"), Store(path) as store:
            store.begin("digest", {}, VERSIONS)
    finally:
        other.close()


def add_many(store: Store, run: Run) -> None:
    for number in range(1000):
        store.add(run.id, "unit", number, row(number, Verdict.DIVERGE))


class TestLines:
    def test_there_and_back(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        write_lines([row(1), row(2, Verdict.CRASH)], path)
        assert read_lines(path) == [row(1), row(2, Verdict.CRASH)]

    def test_a_last_line_that_was_cut_short_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        write_lines([row(1), row(2)], path)
        path.write_text(path.read_text()[:-20])
        assert read_lines(path) == [row(1)]

    def test_a_line_that_is_no_row_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        write_lines([row(1)], path)
        path.write_text('{"cat": 1}\n' + path.read_text())
        with pytest.raises(StoreError, match=r"rows\.jsonl:1 is no row"):
            read_lines(path)
        for text in ('{"cat": 1}', "rubbish"):  # without an end of line, and yet not cut
            path.write_text(text)
            with pytest.raises(StoreError, match=r"rows\.jsonl:1 is no row"):
                read_lines(path)

    def test_a_device_that_is_full_is_named(self) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("this system has no device that is always full")
        with pytest.raises(StoreFullError, match="cannot write /dev/full"):
            write_lines([row(1)], Path("/dev/full"))


class TestMerge:
    def test_two_stores_are_one(self, tmp_path: Path) -> None:
        one, two = filled(tmp_path / "1.db", None, 1), filled(tmp_path / "2.db", None, 2)
        assert merge([tmp_path / "1.db", tmp_path / "2.db"], tmp_path / "all.db") == 2
        with Store(tmp_path / "all.db") as store:
            assert {run.id for run in store.runs()} == {one.id, two.id}

    def test_merged_again_nothing_counts_twice(self, tmp_path: Path) -> None:
        filled(tmp_path / "1.db", "1/2", 1)
        write_lines([row(3)], tmp_path / "3.jsonl")
        for _ in range(2):
            assert merge([tmp_path / "1.db", tmp_path / "3.jsonl"], tmp_path / "all.db") == 2

    def test_a_run_that_was_merged_before_its_end_ends(self, tmp_path: Path) -> None:
        plan, versions, out = {"seed": 1}, {"torch": "1"}, tmp_path / "all.db"
        with Store(tmp_path / "1.db") as store:
            run, _ = store.begin("c", plan, versions)
            store.add(run.id, "u", 0, row(1))
        merge([tmp_path / "1.db"], out)
        with Store(tmp_path / "1.db") as store:
            store.add(run.id, "u", 1, row(2))
            store.finish(run.id)
            (ended,) = store.runs()
        assert merge([tmp_path / "1.db"], out) == 2
        with Store(out) as store:
            assert store.runs() == [ended]

    def test_shards_become_one_run_which_is_finished_when_all_are(self, tmp_path: Path) -> None:
        for number in (1, 2, 3):
            filled(tmp_path / f"{number}.db", f"{number}/3", number)
        out = tmp_path / "all.db"
        merge([tmp_path / "1.db", tmp_path / "2.db"], out)
        with Store(out) as store:
            (run,) = store.runs()
            assert (run.finished, len(store.rows(run.id))) == (None, 2)
        merge([tmp_path / "3.db"], out)
        with Store(out) as store:
            (run,) = store.runs()
            assert [item.case for item in store.rows(run.id)] == ["c::n::1", "c::n::2", "c::n::3"]
            assert run.finished is not None

    def test_the_same_shard_of_a_second_campaign_is_a_second_run(self, tmp_path: Path) -> None:
        filled(tmp_path / "1.db", "1/2", 1)
        filled(tmp_path / "2.db", "1/2", 1)
        assert merge([tmp_path / "1.db", tmp_path / "2.db"], tmp_path / "all.db") == 2

    def test_a_source_that_is_no_store_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text(json.dumps({"cat": 1}) + "\n")
        with pytest.raises(StoreError, match=r"x\.jsonl:1"):
            merge([tmp_path / "x.jsonl"], tmp_path / "all.db")
