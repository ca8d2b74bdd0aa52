"""campaign: subjects × corpora, through an executor, into rows.

In: names of subjects and corpora, limits. Out: a stream of progress, and at the end a `Campaign` with all
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from gradparity.case import Match
from gradparity.corpus.registry import corpus
from gradparity.executors.inprocess import InProcess
from gradparity.executors.local import Local
from gradparity.executors.unit import Finished, Lost, Message, Result, Unit
from gradparity.expected import Expected, Known, KnownFallback
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict
from gradparity.work import Task, run_unit


@dataclass(frozen=True)
class Plan:
    """What to run. `limit_per_corpus` spreads the cases evenly over a corpus's chunks; `processes` 0 means
    in this one.
    """

    subjects: tuple[str, ...]
    corpora: tuple[str, ...]
    device: str = "cpu"
    processes: int = 2
    timeout: float = 60.0
    match: str = "*"
    limit_per_corpus: int | None = None
    seed: int = 0
    grace: float = 10.0


@dataclass
class Campaign:
    """All rows, which subjects answer for their divergences, and what could not be loaded."""

    rows: list[Row] = field(default_factory=list)
    accountable: frozenset[str] = frozenset()
    errors: list[str] = field(default_factory=list)
    stale: list[Expected | KnownFallback] = field(default_factory=list)
    interrupted: bool = False

    @property
    def unexpected(self) -> list[Row]:
        """Divergences that fail the run: of accountable subjects, not expected, set aside or stock's own."""
        return [
            row
            for row in self.rows
            if row.subject in self.accountable
            and (row.verdict.is_divergence or row.symptom == "broken-case")
            and not (row.expected or row.set_aside or row.stocks_own)
        ]

    @property
    def unlisted(self) -> list[Row]:
        """Cases with fallbacks that fail the run: of accountable subjects, and not in the file."""
        return [row for row in self.rows if row.unlisted]

    @property
    def exit_code(self) -> int:
        """As pytest's: 2 interrupted, 1 failed, 5 nothing ran, 0 fine."""
        if self.interrupted:
            return 2
        if self.unexpected or self.unlisted or self.stale or self.errors:
            return 1
        return 0 if self.rows else 5


class Listener(Protocol):
    """Somebody who watches a campaign."""

    def units(self, total: int) -> None:
        """How many units there are."""

    def unit_done(self) -> None:
        """A unit is finished."""

    def row(self, row: Row) -> None:
        """A row is there."""


def units(plan: Plan) -> list[Unit]:
    """The plan as units of work, one per subject and chunk. Raises UnknownNameError or UnavailableError."""
    return [
        Unit(task.to_json(), plan.timeout)
        for name in plan.corpora
        for chunk, limit in _chunks(plan, name)
        for task in (_task(plan, subject, name, chunk, limit) for subject in plan.subjects)
    ]


def run(plan: Plan, known: Known | None, listener: Listener) -> Campaign:
    """Runs the plan. Without a file of what is known, fallbacks are held against nobody. An interrupt
    (Ctrl-C) ends it early with the rows so far.
    """
    accountable = frozenset(name for name in plan.subjects if resolve(name).accountable)
    campaign = Campaign(accountable=accountable)
    work = units(plan)
    listener.units(len(work))
    messages = _executor(plan).run(work)
    try:
        for message in messages:
            _take(message, campaign, listener)
    except KeyboardInterrupt:
        campaign.interrupted = True
    finally:
        messages.close()  # type: ignore[attr-defined]
    if known is not None:
        campaign.rows = known.mark(campaign.rows, accountable)
        campaign.stale = [] if campaign.interrupted else known.stale(campaign.rows)
    return campaign


def _executor(plan: Plan) -> InProcess | Local:
    return Local(run_unit, plan.processes, plan.grace) if plan.processes else InProcess(run_unit)


def _task(plan: Plan, subject: str, name: str, chunk: str, limit: int | None) -> Task:
    return Task(subject, name, chunk, plan.device, plan.seed, plan.match, limit)


def _chunks(plan: Plan, name: str) -> Iterator[tuple[str, int | None]]:
    match = Match(plan.match)
    names = [chunk for chunk in corpus(name).chunks() if match.takes_chunk(name, chunk)]
    most = plan.limit_per_corpus
    if most is None:
        yield from ((chunk, None) for chunk in names)
        return
    if most <= len(names):
        yield from ((names[place * len(names) // most], 1) for place in range(most))
        return
    for place, chunk in enumerate(names):
        yield chunk, most // len(names) + (place < most % len(names))


def _take(message: Message, campaign: Campaign, listener: Listener) -> None:
    row: Row | None = None
    if isinstance(message, Result):
        row = Row.from_json(message.data)
    elif isinstance(message, Lost):
        row = _lost(message)
        if message.step is None:
            listener.unit_done()
    elif isinstance(message, Finished):
        if message.error:
            task = Task(**message.unit.payload)
            campaign.errors.append(f"{task.subject} {task.corpus}::{task.chunk}: {message.error}")
        listener.unit_done()
    if row is not None:
        campaign.rows.append(row)
        listener.row(row)


def _lost(message: Lost) -> Row:
    task = Task(**message.unit.payload)
    label = message.label or {"case": f"{task.corpus}::{task.chunk}", "seed": task.seed}
    verdict = Verdict.TIMEOUT if message.why == "timeout" else Verdict.CRASH
    symptom = message.why if message.label else f"{message.why}-outside-case"
    return Row(label["case"], label["seed"], task.corpus, task.subject, verdict, symptom, message.detail)
