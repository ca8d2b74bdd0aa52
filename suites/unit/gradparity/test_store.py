"""The store: rows come back, also after a crash; a file that is no store, or a full disk, is told clearly."""

import json
import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from gradparity.errors import StoreError, StoreFullError
from gradparity.store.lines import read_lines, write_lines
from gradparity.store.merge import merge
from gradparity.store.store import HEADER, CaseDone, Run, Store, UnitDone
from gradparity.verdict import Row, Verdict

VERSIONS = {"torch": "2"}


def row(number: int, verdict: Verdict = Verdict.AGREE) -> Row:
    return Row(f"c::n::{number}", 0, "c", "s", verdict, exhibit={"errors": []})


def filled(path: Path, shard: str | None = None, *numbers: int, campaign: str = "digest") -> Run:
    with Store(path) as store:
        run, _ = store.begin(campaign, {"shard": shard}, VERSIONS)
        for number in numbers:
            store.add(run.id, CaseDone(f"unit {number}", 0, row(number)))
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
    path = tmp_path / "s.db"
    with Store(path) as store:
        run, _ = store.begin("digest", {}, VERSIONS)
        for _ in range(2):
            store.add(run.id, CaseDone("unit", 0, row(0)))
            store.add(run.id, UnitDone("unit"))
        assert len(store.rows()) == 1
    assert len(path.read_text().splitlines()) == 4


def test_each_entry_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = Store(path)
    run, _ = store.begin("digest", {}, VERSIONS)
    for number in range(2):
        store.add(run.id, CaseDone("unit", number, row(number), {"seconds": 1.5}))
        with Store(path, create=False) as other:
            assert other.entries(run.id) == store.entries(run.id)
            assert len(other.rows()) == number + 1


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
    path.write_bytes(b"no store at all, but long enough to be taken for one\n" * 40)


def rows_only(path: Path) -> None:
    write_lines([row(1)], path)


def torn(path: Path) -> None:
    filled(path, None, 1, 2)
    path.write_bytes(path.read_bytes().replace(b'"kind"', b'"ki\nnd"', 2))


def of_sqlite(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE meta (name TEXT)")


def newer(path: Path) -> None:
    filled(path, None, 1)
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 99', 1))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (garbage, "no store of gradparity"),
        (rows_only, "no store of gradparity"),
        (torn, r"s\.db:2 is no line of a store"),
        (of_sqlite, "version 1 of the format"),
        (newer, "version 99 of the format"),
    ],
)
def test_a_file_that_is_no_store_says_so_and_what_to_do(tmp_path: Path, spoil, said: str) -> None:
    path = tmp_path / "s.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=said) as caught, Store(path) as store:
        store.rows()
    assert "try " in str(caught.value)
    assert path.read_bytes() == before


def test_a_store_that_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store(tmp_path / "s.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [0, 10, len(HEADER) - 1, len(HEADER)])
def test_a_store_that_was_killed_while_it_was_made_is_made_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(HEADER[:cut])
    with Store(path, create=False) as store:
        assert store.runs() == []
    filled(path, None, 1)
    with Store(path, create=False) as store:
        assert store.rows() == [row(1)]


def test_a_line_that_was_cut_short_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    run = filled(path, None, 1)
    with path.open("a") as file:
        file.write('{"kind": "case", "of": ')
    with Store(path, create=False) as store:
        assert store.rows() == [row(1)]
    with Store(path) as store:
        store.add(run.id, CaseDone("unit 2", 0, row(2)))
    with Store(path, create=False) as store:
        assert store.rows() == [row(1), row(2)]


def write_many(path: Path, first: int) -> None:
    filled(path, None, *range(first, first + 200), campaign=str(first))


def test_two_processes_write_to_one_store(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=write_many, args=(path, first)) for first in (0, 200)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    with Store(path, create=False) as store:
        assert len(store.runs()) == 2
        assert {item.case for item in store.rows()} == {f"c::n::{number}" for number in range(400)}


def test_a_full_disk_loses_no_row(tmp_path: Path, monkeypatch) -> None:
    with Store(tmp_path / "s.db") as store, open("/dev/full", "wb", buffering=0) as full:
        run, _ = store.begin("digest", {}, VERSIONS)
        store.add(run.id, CaseDone("unit", 0, row(0)))
        monkeypatch.setattr(store, "_file", full)
        with pytest.raises(StoreFullError, match="it continues"):
            store.add(run.id, CaseDone("unit", 1, row(1)))
        monkeypatch.undo()
        assert (store.rows(), store.unwritten) == ([row(0)], [row(1)])


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
            store.add(run.id, CaseDone("u", 0, row(1)))
        merge([tmp_path / "1.db"], out)
        with Store(tmp_path / "1.db") as store:
            store.add(run.id, CaseDone("u", 1, row(2)))
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
