"""Store: the results of runs in one SQLite file.

In: rows, by run, unit of work and step. Out: the same rows; what was done of an unfinished run, so that it
goes on where it was killed. What is written twice is there once.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradparity.reading import read_as, written_by_us
from gradparity.store.schema import failure, opened
from gradparity.verdict import Row

PATIENCE = 0.5
"""Seconds that rows without a finding may wait to be written together; a finding is written at once."""


@dataclass(frozen=True)
class Run:
    """One run: its id, the digest of its plan without the shard, the plan, versions, times."""

    id: str
    campaign: str
    plan: dict[str, Any]
    versions: dict[str, str]
    started: float
    finished: float | None = None


RUN = ("id", "campaign", "plan", "versions", "started", "finished")


class Store:
    """An open store. Raises StoreError where the file cannot be used, StoreFullError where the disk is
    full.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self._connection = opened(path, create)
        self._waiting: list[tuple[str, str, int, str]] = []
        self._written = time.monotonic()
        self._failed = False

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if not self._failed:
                self.flush()
        finally:
            self._connection.close()

    def begin(self, campaign: str, plan: dict[str, Any], versions: dict[str, str]) -> tuple[Run, bool]:
        """The unfinished run of this very plan under the same versions, and True; else a new one, and
        False.
        """
        for run in reversed(self.runs()):
            if run.finished is None and (run.campaign, run.plan, run.versions) == (campaign, plan, versions):
                return run, True
        run = Run(uuid.uuid4().hex[:12], campaign, plan, versions, time.time())
        self.add_run(run)
        return run, False

    def add_run(self, run: Run) -> None:
        """Writes a run, unless it is there."""
        texts = (json.dumps(run.plan, sort_keys=True), json.dumps(run.versions, sort_keys=True))
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, ?)",
                (run.id, run.campaign, *texts, run.started, run.finished),
            )

    def add(self, run: str, unit: str, step: int, row: Row) -> None:
        """Writes one row: a finding at once, others together after a moment."""
        self._waiting.append((run, unit, step, json.dumps(row.to_json(), sort_keys=True)))
        if row.verdict.is_divergence or time.monotonic() - self._written > PATIENCE:
            self.flush()

    def finish_unit(self, run: str, unit: str, error: str = "") -> None:
        """Notes that a unit of work has no more steps."""
        self.flush()
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO units VALUES (?, ?, ?)", (run, unit, error))

    def finish(self, run: str, when: float | None = None) -> None:
        """Notes that the run is complete, now or since `when`."""
        self.flush()
        values = (time.time() if when is None else when, run)
        with self._writing() as connection:
            connection.execute("UPDATE runs SET finished = ? WHERE id = ?", values)

    def replan(self, run: Run, plan: dict[str, Any]) -> Run:
        """The run with another plan, written."""
        with self._writing() as connection:
            text = json.dumps(plan, sort_keys=True)
            connection.execute("UPDATE runs SET plan = ? WHERE id = ?", (text, run.id))
        return replace(run, plan=plan)

    def flush(self) -> None:
        """Writes what waits. What cannot be written goes on waiting."""
        if self._waiting:
            with self._writing() as connection:
                connection.executemany("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", self._waiting)
            self._waiting.clear()
        self._written = time.monotonic()

    @property
    def unwritten(self) -> list[Row]:
        """Rows that could not be written."""
        return [Row.from_json(json.loads(text)) for *_, text in self._waiting]

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        found = self._read(f"SELECT {', '.join(RUN)} FROM runs ORDER BY started")
        with self._as_written():
            return [self._run(dict(zip(RUN, one, strict=True))) for one in found]

    def _run(self, found: dict[str, Any]) -> Run:
        return read_as(Run, found | {name: json.loads(found[name]) for name in ("plan", "versions")})

    def rows(self, run: str | None = None) -> list[Row]:
        """The rows of one run, or of all, by unit and step."""
        where, values = ("", ()) if run is None else ("WHERE run = ?", (run,))
        found = self._read(f"SELECT row FROM steps {where} ORDER BY run, unit, step", values)
        with self._as_written():
            return [Row.from_json(json.loads(text)) for (text,) in found]

    def steps(self, run: str) -> Iterator[tuple[str, int, Row]]:
        """The rows of a run with their units and steps."""
        for unit, step, text in self._read(
            "SELECT unit, step, row FROM steps WHERE run = ? ORDER BY unit, step", (run,)
        ):
            with self._as_written():
                row = Row.from_json(json.loads(text))
            yield unit, step, row

    def finished_units(self, run: str) -> dict[str, str]:
        """The units that are complete, with why one ended before its first step, if it did."""
        return dict(self._read("SELECT unit, error FROM units WHERE run = ?", (run,)))

    def _as_written(self) -> AbstractContextManager[None]:
        return written_by_us(
            f"the store {self.path}", "store of gradparity", f"move it away, or sqlite3 {self.path}"
        )

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise failure(error, self.path) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection:
                yield self._connection
        except sqlite3.Error as error:
            self._failed = True
            raise failure(error, self.path) from error
