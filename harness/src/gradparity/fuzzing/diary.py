"""Diary: which cases of a campaign of generated programs are judged, so that a killed one goes on.

In: what decides a campaign, and the number and verdict of each case as it comes. Out: a file of lines
beside the finds; the numbers that are done, the verdicts, the seconds that were used. A last line that was
cut short is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gradparity.errors import StoreError, StoreFullError

FORMAT, VERSION = "gradparity fuzz", 1


@dataclass
class Done:
    """What an earlier process did."""

    numbers: set[int] = field(default_factory=set)
    verdicts: Counter[str] = field(default_factory=Counter)
    rejected: int = 0
    seconds: float = 0.0
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
        if not self.done.numbers:
            self._write({"format": FORMAT, "version": VERSION, "campaign": campaign})

    def note(self, number: int, verdict: str, rejected: int, seconds: float) -> None:
        """Keeps one case."""
        self.done.numbers.add(number)
        self._write(
            {"number": number, "verdict": verdict, "rejected": rejected, "seconds": round(seconds, 2)}
        )

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
        return StoreFullError(
            f"cannot write {self.path}: {error}\n"
            "  try    free some space, and run the same command again: it goes on"
        )


def read(path: Path) -> Done:
    """What a file says. Raises StoreError if it is no diary, or one of another version."""
    done = Done()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            data = json.loads(line)
            if number == 1:
                _check(data, path)
            elif data.get("ended"):
                done.ended = True
            else:
                done.numbers.add(data["number"])
                done.verdicts[data["verdict"]] += 1
                done.rejected += data["rejected"]
                done.seconds = max(done.seconds, data["seconds"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}:{number} is no line of a campaign: {error}\n  try    move it away"
            ) from error
    return done


def _check(data: dict[str, Any], path: Path) -> None:
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise StoreError(
            f"{path} was written by another version of gradparity\n  found  {data.get('format')} "
            f"{data.get('version')}\n  wanted {FORMAT} {VERSION}\n  try    move it away"
        )
