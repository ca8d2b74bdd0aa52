"""Known divergences: one TOML file, checked in both directions.

In: a file with `[[expected]]` tables (subject and case as globs, verdict, reason, link, date) and rows. Out:
rows with the known ones marked, and the stale entries: those that matched executed cases of which none
diverged.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gradparity.errors import ExpectedFileError
from gradparity.verdict import Row, Verdict

FIELDS = ("subject", "case", "verdict", "reason", "link", "date")


@dataclass(frozen=True)
class Expected:
    """One entry. `case` is a glob over whole addresses, `subject` over subject names."""

    subject: str
    case: str
    verdict: Verdict
    reason: str
    link: str
    date: str

    def matches(self, row: Row) -> bool:
        """Whether the entry speaks about this row's case and subject."""
        return fnmatchcase(row.subject, self.subject) and fnmatchcase(row.case, self.case)

    def explains(self, row: Row) -> bool:
        """Whether the row is the divergence that the entry expects."""
        return self.matches(row) and row.verdict is self.verdict

    def describe(self) -> str:
        """One line."""
        return f"{self.verdict} {self.subject} {self.case} ({self.date}): {self.reason}"


def load(path: Path) -> list[Expected]:
    """Reads the file. Raises ExpectedFileError if it cannot be read, or an entry lacks a field or has an
    unknown one.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ExpectedFileError(f"cannot read {path}: {error}") from error
    if set(data) - {"expected"}:
        raise ExpectedFileError(
            f"{path}: unknown tables {sorted(set(data) - {'expected'})}; only [[expected]] is known"
        )
    return [_entry(path, number, entry) for number, entry in enumerate(data.get("expected", []), 1)]


def mark(rows: Iterable[Row], entries: list[Expected]) -> list[Row]:
    """The rows, with those that an entry explains marked as expected."""
    return [row.as_expected() if any(entry.explains(row) for entry in entries) else row for row in rows]


def stale(rows: Iterable[Row], entries: list[Expected]) -> list[Expected]:
    """Entries that matched cases which ran and could be judged, none of which diverged as the entry says."""
    judged = [row for row in rows if not row.set_aside]
    return [
        entry
        for entry in entries
        if any(entry.matches(row) for row in judged) and not any(entry.explains(row) for row in judged)
    ]


def _entry(path: Path, number: int, data: dict[str, object]) -> Expected:
    missing = [name for name in FIELDS if not str(data.get(name, "")).strip()]
    unknown = sorted(set(data) - set(FIELDS))
    if missing or unknown:
        raise ExpectedFileError(
            f"{path}, entry {number}: missing {missing}, unknown {unknown}\n  fields {list(FIELDS)}"
        )
    texts = {name: str(data[name]) for name in FIELDS}
    if texts["verdict"] not in list(Verdict) or not Verdict(texts["verdict"]).is_divergence:
        known = [str(verdict) for verdict in Verdict if verdict.is_divergence]
        raise ExpectedFileError(f"{path}, entry {number}: verdict {texts['verdict']!r} is none of {known}")
    verdict = Verdict(texts.pop("verdict"))
    return Expected(verdict=verdict, **texts)
