"""Store: what campaigns have done, in one file of lines that only grows.

In: a run, then an entry for each judged case and each finished unit of work. Out: the same runs and entries;
what an unfinished run did, so that the same command continues where it was killed. An entry that is
written twice is there once. Several processes may write to one store.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from gradparity.errors import StoreError, StoreFullError
from gradparity.reading import each_line, read_as
from gradparity.verdict import Row

FORMAT, VERSION = "gradparity store", 2
HEADER = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
SQLITE = b"SQLite format 3"
"""How a store of version 1 begins."""


@dataclass(frozen=True)
class Run:
    """One run: its id, the digest of its plan without the shard, the plan, versions, times."""

    id: str
    campaign: str
    plan: dict[str, Any]
    versions: dict[str, str]
    started: float
    finished: float | None = None


@dataclass(frozen=True)
class CaseDone:
    """A case that was judged. `row`: what a report shows of it, if anything; `facts`: what else its campaign
    counts.
    """

    unit: str
    step: int
    row: Row | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """What the entry is called within its run."""
        return self.unit, self.step

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        row = None if self.row is None else self.row.to_json()
        return {"unit": self.unit, "step": self.step, "row": row, "facts": self.facts}


@dataclass(frozen=True)
class UnitDone:
    """A unit of work that has no more steps. `error`: why it ended before its first, if it did."""

    unit: str
    error: str = ""

    @property
    def key(self) -> tuple[str, None]:
        """What the entry is called within its run."""
        return self.unit, None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


Entry = CaseDone | UnitDone
KINDS: dict[str, type[CaseDone] | type[UnitDone]] = {"case": CaseDone, "unit": UnitDone}


class Store:
    """An open store. Raises StoreError where the file cannot be used, StoreFullError where it cannot be
    written. `unwritten`: rows that could not be written.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self.unwritten: list[Row] = []
        self._runs: dict[str, Run] = {}
        self._entries: dict[str, dict[tuple[str, int | None], Entry]] = {}
        if not create and not path.is_file():
            raise StoreError(f"no store at {path}\n  try    gradparity run … --store {path}")
        self._lock = fcntl.LOCK_EX if create else fcntl.LOCK_SH
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("a+b" if create else "rb", buffering=0)
            self._read(create)
        except OSError as error:
            made = StoreFullError if create else StoreError
            raise made(f"cannot open the store {path}: {error}\n  try    another path") from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def begin(self, campaign: str, plan: dict[str, Any], versions: dict[str, str]) -> tuple[Run, bool]:
        """The unfinished run of this very plan under the same versions, and True; else a new one, and
        False.
        """
        plain: dict[str, Any] = json.loads(json.dumps(plan))  # as the file gives it back
        for run in reversed(self.runs()):
            if run.finished is None and (run.campaign, run.plan, run.versions) == (campaign, plain, versions):
                return run, True
        run = Run(uuid.uuid4().hex[:12], campaign, plain, versions, time.time())
        self.add_run(run)
        return run, False

    def add_run(self, run: Run) -> None:
        """Writes a run, in the place of one with its id."""
        if self._runs.get(run.id) != run:
            self._append({"kind": "run"} | asdict(run))
            self._runs[run.id] = run

    def add(self, run: str, entry: Entry) -> None:
        """Writes an entry of a run, unless it is there."""
        mine = self._entries.setdefault(run, {})
        if entry.key in mine:
            return
        kind = "case" if isinstance(entry, CaseDone) else "unit"
        try:
            self._append({"kind": kind, "of": run} | entry.to_json())
        except StoreError:
            self.unwritten += [entry.row] if isinstance(entry, CaseDone) and entry.row is not None else []
            raise
        mine[entry.key] = entry

    def finish(self, run: str, when: float | None = None) -> None:
        """Writes that the run is complete, now or since `when`."""
        self.add_run(replace(self._runs[run], finished=time.time() if when is None else when))

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return sorted(self._runs.values(), key=lambda run: run.started)

    def entries(self, run: str) -> list[Entry]:
        """The entries of a run, as they were written."""
        return list(self._entries.get(run, {}).values())

    def rows(self, run: str | None = None) -> list[Row]:
        """The rows of one run, or of all, by unit and step."""
        chosen = self._entries if run is None else {run: self._entries.get(run, {})}
        steps = [
            (name, *entry.key, entry.row)
            for name, entries in chosen.items()
            for entry in entries.values()
            if isinstance(entry, CaseDone)
        ]
        return [row for *_, row in sorted(steps, key=lambda step: step[:3]) if row is not None]

    def _read(self, create: bool) -> None:
        """Reads all lines. What a killed writer left of its last line is no line; it is cut off before
        anything is appended.
        """
        with self._locked():
            data = self.path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            self._check(data)
            if create and whole != data:
                self._file.truncate(len(whole))
            if create and not whole:
                self._file.write(HEADER)
        lines = whole.decode(errors="replace").split("\n")[1:]
        way_out = f"move {self.path} away"
        for _ in each_line(self.path, ["", *lines], self._take, "line of a store of gradparity", way_out):
            pass

    def _check(self, data: bytes) -> None:
        """Raises StoreError if this is neither a store nor the beginning of one."""
        if HEADER.startswith(data[: len(HEADER)]):
            return
        head = data.partition(b"\n")[0]
        found: Any = 1 if data.startswith(SQLITE) else header_of(head)
        if found is None:
            raise StoreError(f"{self.path} is no store of gradparity\n  try    another --store")
        raise StoreError(
            f"{self.path} was written by another version of gradparity\n  found  version {found!r} of the "
            f"format\n  wanted version {VERSION}\n  try    that gradparity, or another --store"
        )

    def _take(self, number: int, data: Any) -> None:
        kind = data.pop("kind")
        if kind == "run":
            run = read_as(Run, data)
            self._runs[run.id] = run
            return
        entry: Entry = read_as(KINDS[kind], data)
        self._entries.setdefault(read_as(str, data["of"]), {}).setdefault(entry.key, entry)

    def _append(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, sort_keys=True).encode() + b"\n"
        try:
            with self._locked():
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "no space left")
        except (OSError, ValueError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC
            way = "free some space, and run the same command again: it continues" if full else "another path"
            raise StoreFullError(f"cannot write to the store {self.path}: {error}\n  try    {way}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process appends meanwhile."""
        fcntl.flock(self._file, self._lock)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class Progress:
    """One run in a store, as the campaign sees it. `continued`: whether the run had begun before."""

    store: Store
    run: Run
    continued: bool

    @classmethod
    def of(cls, store: Store, campaign: str, plan: dict[str, Any], versions: dict[str, str]) -> Progress:
        """The unfinished run of this plan, or a new one."""
        return cls(store, *store.begin(campaign, plan, versions))

    def entries(self) -> list[Entry]:
        """What an earlier process wrote."""
        return self.store.entries(self.run.id)

    def write(self, entry: Entry) -> None:
        """Writes an entry."""
        self.store.add(self.run.id, entry)

    def finish(self) -> None:
        """Writes that the run is complete."""
        self.store.finish(self.run.id)


def header_of(line: bytes) -> Any:
    """The version that the first line of a store names; None if it is no such line."""
    try:
        found = json.loads(line)
        return found["version"] if found["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
