"""outcome: what a conformance run says of a backend.

In: a finished campaign over one subject. Out: a `Conformance` in frozen values, which can be written as JSON
and read again. It holds nothing that another run of the same versions would not repeat: no times, no numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gradparity.campaign import Campaign, Plan
from gradparity.case import SEPARATOR
from gradparity.conform.levels import LEVELS, level_of_symptom, shown_by
from gradparity.errors import StoreError
from gradparity.reading import read_as, written_by_us
from gradparity.verdict import ALSO, Row, Verdict
from gradparity.versions import versions
from gradparity.writing import write_text

FORMAT = 1
PASSED, FAILED, STOCKS, EXPECTED, ASIDE = "passed", "failed", "stock's own", "expected", "set aside"
REMARKS = (Verdict.MEMORY, Verdict.SLOW)
"""Verdicts on what a case costs: it passes, and its results say so."""
RESULTS = (PASSED, FAILED, STOCKS, EXPECTED, ASIDE)


@dataclass(frozen=True)
class Result:
    """One case at one level. `signature`: what divergences of one kind share."""

    case: str
    level: int
    result: str
    verdict: str
    symptom: str = ""
    stage: str = ""
    signature: str = ""


@dataclass(frozen=True)
class Conformance:
    """All results of a backend. `planned`: how many cases there are; of a slow backend only the first ones
    run within the time: then no level is claimed. `policy` is that of `Blame`.
    """

    backend: str
    versions: Mapping[str, str]
    device: str
    policy: str
    planned: int
    results: tuple[Result, ...] = field(default=())

    def count(self, level: int) -> Counter[str]:
        """How many cases of a level have each result."""
        return Counter(item.result for item in self.results if item.level == level)

    @property
    def reached(self) -> int:
        """The highest level at which, and below which, nothing of what ran fails and something passes; -1:
        none."""
        counts = [self.count(level) for level in range(len(LEVELS))]
        fails = (level for level, count in enumerate(counts) if count[FAILED] or not count[PASSED])
        return next(fails, len(LEVELS)) - 1

    @property
    def cases(self) -> int:
        """How many cases ran."""
        return len({item.case for item in self.results})

    @property
    def is_complete(self) -> bool:
        """Whether all cases ran."""
        return self.cases >= self.planned

    @property
    def unjudged(self) -> list[int]:
        """The levels of which nothing can be said: no case passed, failed, or is expected to fail."""
        judged = {item.level for item in self.results if item.result in (PASSED, FAILED, EXPECTED)}
        return [level for level in range(len(LEVELS)) if level not in judged]

    def describe(self) -> str:
        """The last line: how many cases ran, and the level."""
        if self.is_complete:
            reached = f"level {self.reached} of {len(LEVELS) - 1}" if self.reached >= 0 else "no level"
            return f"{self.cases} cases. {self.backend} reaches {reached}."
        ran = f"incomplete: {self.cases} of {self.planned} cases; {self.planned - self.cases} had no time"
        shown = (
            f"in these, nothing fails up to level {self.reached}" if self.reached >= 0 else "no level passes"
        )
        return f"{ran}. Of {self.backend} no level is claimed; {shown}."

    def failures(self) -> list[tuple[Result, int]]:
        """The first failure of each kind at each level, with how many there are."""
        failed = [item for item in self.results if item.result == FAILED]
        counts = Counter((item.level, item.signature) for item in failed)
        first = {(item.level, item.signature): item for item in reversed(failed)}
        return [(first[key], counts[key]) for key in sorted(first, key=lambda key: (key[0], -counts[key]))]

    def text(self) -> str:
        """As JSON: the counts first, for readers, then all cases, one a line."""
        levels = [
            {"level": number, "title": level.title} | {name: self.count(number)[name] for name in RESULTS}
            for number, level in enumerate(LEVELS)
        ]
        head = {
            "format": FORMAT,
            "reached": self.reached,
            "complete": self.is_complete,
            "cases": self.cases,
            "levels": levels,
        }
        whole = json.dumps(head | asdict(self) | {"results": []}, indent=1).removesuffix("[]\n}")
        lines = ",\n".join(f"  {json.dumps(asdict(item))}" for item in self.results)
        return f"{whole}[\n{lines}\n ]\n}}\n"

    def write(self, path: Path) -> None:
        """Writes the JSON. Raises StoreFullError."""
        write_text(path, self.text())


def read(path: Path) -> Conformance:
    """Reads what `write` wrote. Raises StoreError if it is something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    with written_by_us(str(path), "conformance run", "a file that `gradparity conform` wrote"):
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, not {FORMAT}")
        return read_as(Conformance, data)


def conformance(plan: Plan, campaign: Campaign) -> Conformance:
    """What a campaign over one subject says."""
    (subject,) = plan.subjects
    backend = subject.removeprefix("compile:")
    failing = {row.case for row in campaign.unexpected}
    ran = {f"{row.subject} {SEPARATOR.join(row.case.split(SEPARATOR)[:2])}" for row in campaign.rows}
    results = [item for row in campaign.rows for item in _results(row, row.case in failing)]
    return Conformance(
        backend,
        {name: text for name, text in versions().items() if name != "system"} | _version_of(backend),
        plan.device,
        plan.blame.value,
        campaign.total - len(campaign.ended - ran),
        tuple(sorted(results, key=lambda item: (item.level, item.case))),
    )


def _results(row: Row, fails: bool) -> Iterable[Result]:
    """One result for each level that the case shows, and for each at which an oracle finds something. Of a
    sample whose gradients are wrong, the values are right if no oracle says otherwise.
    """
    if row.set_aside:
        found = [(level, ASIDE) for level in shown_by(row.case)]
    elif row.verdict is Verdict.AGREE or row.verdict in REMARKS:
        found = [(level, PASSED) for level in shown_by(row.case)]
    else:
        result = FAILED if fails else EXPECTED if row.expected else STOCKS
        also = [note.removeprefix(ALSO).partition(":")[0] for note in row.notes if note.startswith(ALSO)]
        wrong: dict[int, str] = {}
        for symptom in (row.symptom, *also):
            wrong.setdefault(level_of_symptom(symptom, row.case), symptom)
        for level, symptom in wrong.items():
            yield Result(row.case, level, result, row.verdict.value, symptom, row.stage, row.signature)
        found = [(level, PASSED) for level in shown_by(row.case) if level < min(wrong)]
    for level, result in found:
        own = result == ASIDE or row.verdict in REMARKS
        yield Result(row.case, level, result, row.verdict.value if own else "AGREE")


def _version_of(backend: str) -> dict[str, str]:
    """The version of the package that has the backend's name, or that of its module."""
    place = backend.partition(":")[0]
    name = place.partition(".")[0]
    try:
        return {} if not name or place.endswith(".py") else {name: version(name)}
    except PackageNotFoundError:
        return {}
