"""Diary: what a campaign of generated programs has done, so that a killed one goes on as if it had run.

In: what decides a campaign; then the number of each case as it comes, its row and where the campaign stands.
Out: a file of lines beside the finds; the numbers that are done, the rows, the last state. A last line that
was cut short is left out.
"""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gradparity.errors import StoreError, StoreFullError
from gradparity.reading import each_line, read_as
from gradparity.verdict import Row

FORMAT, VERSION = "gradparity fuzz", 2
State = dict[str, int | float | list[str] | dict[str, int]]


@dataclass
class Done:
    """What an earlier process did. `state`: where its campaign stood, in plain data; `pending`: signatures of
    finds of a case that it did not end, which will be found again.
    """

    numbers: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    ended: bool = False


class Diary:
    """The file of one campaign. `done` is what it says so far; a campaign that ended begins anew."""

    def __init__(self, folder: Path, campaign: dict[str, Any]) -> None:
        text = json.dumps(campaign, sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        self.path = folder / f"campaign_{digest}.jsonl"
        self.done = read(self.path) if self.path.exists() else Done()
        if self.done.ended:
            self.done = Done()
            self.path.unlink()
        self._file = self._opened()
        if not self._file.tell():
            self._write({"format": FORMAT, "version": VERSION, "campaign": campaign})

    def note(self, number: int, state: dict[str, Any], row: Row | None = None) -> None:
        """Keeps one case: where the campaign stands after it, and the row that a report shows."""
        self.done.numbers.add(number)
        self._write({"number": number, "state": state, "row": None if row is None else row.to_json()})

    def find(self, row: Row) -> None:
        """Keeps the row of a find of the case that is noted next; to be called before the find is saved."""
        self._write({"find": row.to_json()})

    def end(self) -> None:
        """Keeps that the campaign is over."""
        self._write({"ended": True})
        self._file.close()

    def _opened(self) -> IO[str]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():  # what a killed writer left of its last line is no line
                text = self.path.read_text(encoding="utf-8")
                self.path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
            return self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._full(error) from error

    def _write(self, data: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(data, sort_keys=True) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> StoreFullError:
        full = error.errno == errno.ENOSPC
        way = "free some space, and run the same command again: it goes on" if full else "another --finds"
        return StoreFullError(f"cannot write {self.path}: {error}\n  try    {way}")


def read(path: Path) -> Done:
    """What a file says. Raises StoreError if it is no diary, or one of another version."""
    done, finds = Done(), list[Row]()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")

    def take(number: int, data: Any) -> None:
        if number == 1:
            _check(data, path)
        elif data.get("ended"):
            done.ended = True
        elif "find" in data:
            finds.append(Row.from_json(data["find"]))
        else:
            done.numbers.add(read_as(int, data["number"]))
            done.rows += finds if data["row"] is None else [*finds, Row.from_json(data["row"])]
            finds.clear()
            done.state = read_as(State, data["state"])
            done.state["seconds"]

    for _ in each_line(path, lines[:-1], take, "line of a campaign", "move it away"):
        pass
    done.pending = frozenset(row.signature for row in finds)
    return done


def _check(data: dict[str, Any], path: Path) -> None:
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise StoreError(
            f"{path} was written by another version of gradparity\n  found  {data.get('format')!r} "
            f"{data.get('version')!r}\n  wanted {FORMAT} {VERSION}\n  try    move it away"
        )
