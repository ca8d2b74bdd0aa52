"""Verdict: what the oracles say about one case under one subject, and the row that carries it out of the
worker.

In: findings. Out: `Row`, a frozen value of plain data that can be written as JSON.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from gradparity.case import Case
from gradparity.reading import read_as

FALLBACK = re.compile(r"fallback: (?:\[(?P<code>[\w-]+)\] )?")
"""How a subject's note about a fallback begins: with the code of its reason, if it has one."""


class Verdict(StrEnum):
    """The closed list of answers."""

    AGREE = "AGREE"
    DIVERGE = "DIVERGE"
    HOOK_ORDER = "HOOK_ORDER"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    MEMORY = "MEMORY"
    SLOW = "SLOW"
    UNSUPPORTED = "UNSUPPORTED"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    REF_UNSTABLE = "REF_UNSTABLE"

    @property
    def is_divergence(self) -> bool:
        """Whether the subject did something that eager does not, or took more for the same."""
        return self is not Verdict.AGREE and not self.is_set_aside

    @property
    def is_set_aside(self) -> bool:
        """Whether the case says nothing about the subject."""
        return self in (Verdict.NONDETERMINISTIC, Verdict.REF_UNSTABLE)


@dataclass(frozen=True)
class Finding:
    """What one oracle found: the verdict it asks for, a symptom (a stable short word) and the reason in
    words. `place`: where it was seen, in words that another run of the same defect would repeat.
    """

    verdict: Verdict
    symptom: str
    reason: str
    place: str = ""

    @property
    def note(self) -> str:
        """What is said of it if another finding decides."""
        return f"{ALSO}{self.symptom}: {self.reason}"


ALSO = "also "
"""Begins the note of a finding that does not decide."""


@dataclass(frozen=True)
class Row:
    """One judged case under one subject. `stocks_own`: it diverges, but only where stock torch (the same
    forward, or the same code generator) diverges without the subject too. `unlisted`: codes of fallbacks that
    the file of known ones lacks. `place`: the finding's; `check`: the check that found it. `stage` and
    `operator` are what an ablation names, `signature` the digest that equal finds share, `exhibit` what a
    report shows.
    """

    case: str
    seed: int
    corpus: str
    subject: str
    verdict: Verdict
    symptom: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    fell_back: bool = False
    unlisted: tuple[str, ...] = ()
    set_aside: bool = False
    expected: bool = False
    stocks_own: bool = False
    compiles: int = 0
    seconds: float = 0.0
    place: str = ""
    check: str = ""
    stage: str = ""
    operator: str = ""
    signature: str = ""
    exhibit: dict[str, Any] = field(default_factory=dict, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        lists = {"notes": list(self.notes), "unlisted": list(self.unlisted)}
        return asdict(self) | {"verdict": self.verdict.value} | lists

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """Builds a row from plain data, ignoring unknown keys. Raises ValueError if they are no row."""
        return read_as(cls, data)

    @property
    def is_find(self) -> bool:
        """Whether the subject diverges here, and answers for it."""
        return self.verdict.is_divergence and not (self.set_aside or self.stocks_own)

    @property
    def checks(self) -> tuple[str, ...]:
        """The check that found it, if one did: what it takes to find it again."""
        return (self.check,) if self.check else ()

    @property
    def where(self) -> str:
        """Which stage is to blame, in words: what an ablation found; without one, what the subject does
        that the stock stage before it does not, or the stock stage that diverges without the subject.
        """
        if not self.stage:
            return ""
        if self.exhibit.get("ablation", {}).get("stage"):
            return f"broken by {self.stage}" + (f" at {self.operator}" if self.operator else "")
        return f"{'already' if self.stocks_own else 'only'} with {self.stage}"

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The codes of all fallbacks that the notes speak of, each once; "" for one without a code."""
        found = (FALLBACK.match(note) for note in self.notes)
        return tuple(dict.fromkeys(match["code"] or "" for match in found if match))

    def as_expected(self) -> Row:
        """The same row, marked as a known divergence."""
        return replace(self, expected=True)


def row_of(case: Case, subject: str, verdict: Verdict, symptom: str = "", reason: str = "") -> Row:
    """A bare row for this case."""
    return Row(case.address, case.seed, case.corpus, subject, verdict, symptom, reason)
