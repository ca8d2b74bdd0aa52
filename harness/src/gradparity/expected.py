"""Known divergences and known fallbacks: one TOML file, checked in both directions.

In: a file with `[[expected]]` tables (subject and case as globs, verdict, reason, link, date) and
`[[fallback]]` tables (subject as a glob, a list of globs of cases, code, reason, date), and rows. Out: rows
with the known divergences marked and the unknown fallbacks named, and the stale entries: those that matched
executed cases of which none diverged, or fell back, as the entry says. Only a run of all cases says that of
a glob over cases: a sample may leave out just those that diverge. An entry may be of some releases of torch
only, `torch = "2.14.."` or `torch = "2.11..2.13"`; under others it is not there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from gradparity.errors import ExpectedFileError
from gradparity.verdict import Row, Verdict
from gradparity.versions import is_within

TABLES = {"expected", "fallback"}
FIELDS = ("subject", "case", "verdict", "reason", "link", "date")
FALLBACK_FIELDS = ("subject", "cases", "code", "reason", "date")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """What every entry says. `case` is a glob over whole addresses, `subject` over subject names as a user
    gives them: also without "compile:", or a file alone.
    """

    subject: str
    case: str
    reason: str
    date: str

    def matches(self, row: Row) -> bool:
        """Whether the entry speaks about this row's case and subject."""
        backend = row.subject.removeprefix("compile:")
        names = (row.subject, backend, re.sub(r"(?<=\.py):\w+$", "", backend))
        return fnmatchcase(row.case, self.case) and any(fnmatchcase(name, self.subject) for name in names)

    @property
    def names_one_case(self) -> bool:
        """Whether `case` is an address, not a glob."""
        return not set(self.case) & set("*?[")


@dataclass(frozen=True, kw_only=True)
class Expected(_Entry):
    """One known divergence. `sometimes`: whether it depends on the device, the release of torch, or the
    sample of cases that is run; then it is never stale.
    """

    verdict: Verdict
    link: str
    sometimes: bool = False

    def explains(self, row: Row) -> bool:
        """Whether the row is the divergence that the entry expects."""
        return self.matches(row) and row.verdict is self.verdict

    def describe(self) -> str:
        """One line."""
        return f"{self.verdict} {self.subject} {self.case} ({self.date}): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class KnownFallback(_Entry):
    """One fallback for one glob over cases. `code` is the reason's; `sometimes`: whether it depends on
    timing; then it is never stale.
    """

    code: str
    sometimes: bool = False

    def explains(self, row: Row) -> bool:
        """Whether the row has the fallback that the entry lists."""
        return self.matches(row) and self.code in row.fallbacks

    def describe(self) -> str:
        """One line."""
        return f"fallback {self.code} {self.subject} {self.case} ({self.date}): {self.reason}"


@dataclass(frozen=True)
class Known:
    """All that the file says."""

    divergences: tuple[Expected, ...] = ()
    fallbacks: tuple[KnownFallback, ...] = ()

    def mark(self, rows: Iterable[Row], accountable: Container[str] = ()) -> list[Row]:
        """The rows, with divergences that an entry explains marked as expected, and with the fallbacks of
        accountable subjects that no entry lists.
        """
        return [self._marked(row, row.subject in accountable) for row in rows]

    def stale(self, rows: Iterable[Row], *, sampled: bool = False) -> list[Expected | KnownFallback]:
        """Entries that matched cases which ran and could be judged, none of which did as the entry says.

        Args:
            rows: The rows of one run.
            sampled: Whether the run left out cases. Then globs over cases are never stale.
        """
        judged = [row for row in rows if not row.set_aside]
        known: list[Expected | KnownFallback] = [*self.divergences, *self.fallbacks]
        entries = [entry for entry in known if not entry.sometimes and (entry.names_one_case or not sampled)]
        return [
            entry
            for entry in entries
            if any(entry.matches(row) for row in judged) and not any(entry.explains(row) for row in judged)
        ]

    def _marked(self, row: Row, accountable: bool) -> Row:
        if any(entry.explains(row) for entry in self.divergences):
            row = row.as_expected()
        if not accountable or not row.fell_back:
            return row
        listed = {entry.code for entry in self.fallbacks if entry.explains(row)}
        return replace(row, unlisted=tuple(code for code in row.fallbacks if code not in listed))


def load(path: Path) -> Known:
    """Reads the file. Raises ExpectedFileError if it cannot be read, or an entry lacks a field or has an
    unknown one.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExpectedFileError(f"cannot read {path}: {error}") from error
    if set(data) - TABLES:
        raise ExpectedFileError(
            f"{path}: unknown tables {sorted(set(data) - TABLES)}; only {sorted(TABLES)} are known"
        )
    divergences = [_divergence(path, n, entry) for n, entry in _of_this_torch(path, "expected", data)]
    fallbacks = [_fallbacks(path, n, entry) for n, entry in _of_this_torch(path, "fallback", data)]
    return Known(tuple(divergences), tuple(chain.from_iterable(fallbacks)))


def _of_this_torch(path: Path, table: str, data: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries of a table, with their numbers, that are of the installed release of torch."""
    entries = data.get(table, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ExpectedFileError(f"{path}: {table} must be a list of tables, each under [[{table}]]")
    for number, entry in enumerate(entries, 1):
        try:
            if is_within(str(entry.pop("torch", ".."))):
                yield number, entry
        except ValueError as error:
            raise ExpectedFileError(f"{path}, [[{table}]] {number}: torch: {error}") from error


def _divergence(path: Path, number: int, data: dict[str, object]) -> Expected:
    where, sometimes = f"{path}, [[expected]] {number}", data.pop("sometimes", False)
    if not isinstance(sometimes, bool):
        raise ExpectedFileError(f"{where}: sometimes must be true or false")
    texts = _checked(where, data, FIELDS)
    if texts["verdict"] not in list(Verdict) or not Verdict(texts["verdict"]).is_divergence:
        known = [str(verdict) for verdict in Verdict if verdict.is_divergence]
        raise ExpectedFileError(f"{path}, entry {number}: verdict {texts['verdict']!r} is none of {known}")
    verdict = Verdict(texts.pop("verdict"))
    return Expected(verdict=verdict, sometimes=sometimes, **texts)


def _fallbacks(path: Path, number: int, data: dict[str, object]) -> Iterable[KnownFallback]:
    where, sometimes = f"{path}, [[fallback]] {number}", data.pop("sometimes", False)
    cases = data.pop("cases", None)
    texts = _checked(where, data | {"cases": "given" if cases else ""}, FALLBACK_FIELDS)
    if not isinstance(sometimes, bool) or not isinstance(cases, list):
        raise ExpectedFileError(f"{where}: cases must be a list of globs, sometimes true or false")
    del texts["cases"]
    return [KnownFallback(case=str(case), sometimes=sometimes, **texts) for case in cases]


def _checked(where: str, data: dict[str, object], fields: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in fields if not str(data.get(name, "")).strip()]
    unknown = sorted(set(data) - set(fields))
    if missing or unknown:
        raise ExpectedFileError(f"{where}: missing {missing}, unknown {unknown}\n  fields {list(fields)}")
    return {name: str(data[name]) for name in fields}
