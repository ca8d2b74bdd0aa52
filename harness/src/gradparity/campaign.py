"""campaign: subjects × corpora, through an executor, into rows.

In: names of subjects and corpora, limits. Out: a stream of progress, and at the end a `Campaign` with all
rows.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from gradparity.case import EVERY, Match
from gradparity.checks.registry import chosen
from gradparity.corpus.registry import corpus
from gradparity.errors import StoreError
from gradparity.executors.registry import Executor, Resources, executor
from gradparity.executors.unit import Finished, Lost, Message, Result, Unit
from gradparity.expected import Expected, Known, KnownFallback
from gradparity.journal import Journal
from gradparity.shard import Shard
from gradparity.signature import signature_of
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict
from gradparity.work import Task, run_unit

OUTSIDE = "-outside-case"
"""How the symptom ends of what ended a worker before it had a program."""


@dataclass(frozen=True)
class Plan:
    """What to run. `limit_per_corpus` spreads the cases evenly over a corpus's chunks; `processes` 0 means
    in this one; `shuffle` decides their order, and so which cases meet in a process; `fresh`, `checks` and
    `ablate` are as in `Task`; `resources` say where units run.
    """

    subjects: tuple[str, ...]
    corpora: tuple[str, ...]
    device: str = "cpu"
    processes: int = 2
    timeout: float = 60.0
    match: tuple[str, ...] = EVERY
    limit_per_corpus: int | None = None
    seed: int = 0
    grace: float = 10.0
    shard: Shard | None = None
    shuffle: int | None = None
    fresh: bool = False
    checks: tuple[str, ...] = ()
    ablate: bool = False
    resources: Resources = field(default_factory=Resources)

    @property
    def sampled(self) -> bool:
        """Whether some cases of the corpora are left out."""
        return self.limit_per_corpus is not None or self.match != EVERY or self.shard is not None

    def identity(self) -> dict[str, Any]:
        """What decides the results, in plain data: not where, in which order and by how many processes
        it is done.
        """
        data = asdict(self)
        for name in ("processes", "grace", "resources", "shuffle"):
            del data[name]
        plain: dict[str, Any] = json.loads(json.dumps(data | {"shard": None}))  # as a store gives it back
        return plain | {"shard": str(self.shard) if self.shard else None}

    @property
    def campaign(self) -> str:
        """A digest of the plan, the same for all of its shards."""
        data = json.dumps(self.identity() | {"shard": None}, sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=8).hexdigest()


@dataclass
class Campaign:
    """All rows, which subjects answer for their divergences, and what could not be loaded."""

    rows: list[Row] = field(default_factory=list)
    accountable: frozenset[str] = frozenset()
    errors: list[str] = field(default_factory=list)
    stale: list[Expected | KnownFallback] = field(default_factory=list)
    interrupted: bool = False
    broken: str = ""
    unwritten: list[Row] = field(default_factory=list)

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
        """As pytest's: 3 results could not be written, 2 interrupted, 1 failed, 5 nothing ran, 0 fine."""
        if self.broken:
            return 3
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
    chosen(plan.checks)
    return [
        Unit(task.to_json(), plan.timeout)
        for name in plan.corpora
        for chunk, limit in _chunks(plan, name)
        for task in (_task(plan, subject, name, chunk, limit) for subject in plan.subjects)
    ]


def run(plan: Plan, known: Known | None, listener: Listener, journal: Journal | None = None) -> Campaign:
    """Runs the plan. Without a file of what is known, fallbacks are held against nobody. An interrupt
    (Ctrl-C) ends it early with the rows so far; with a journal, the next run goes on there.
    """
    accountable = frozenset(name for name in plan.subjects if resolve(name).accountable)
    campaign = Campaign(accountable=accountable)
    work = _left(units(plan), campaign, listener, journal)
    if plan.shuffle is not None:
        random.Random(plan.shuffle).shuffle(work)
    made = executor(run_unit, plan.processes, plan.grace, plan.resources)
    try:
        _through(made, work, campaign, listener, journal)
        if journal is not None:
            journal.flush() if campaign.interrupted else journal.finish()
    except StoreError as error:
        campaign.broken = str(error)
    if journal is not None:
        campaign.unwritten = journal.unwritten
    if known is not None:
        campaign.rows = known.mark(campaign.rows, accountable)
        campaign.stale = [] if campaign.interrupted else known.stale(campaign.rows, sampled=plan.sampled)
    return campaign


def _left(work: list[Unit], campaign: Campaign, listener: Listener, journal: Journal | None) -> list[Unit]:
    """The units that are still to be done; what is there already is told to the listener."""
    listener.units(len(work))
    if journal is None:
        return work
    for row in journal.rows():
        campaign.rows.append(row)
        listener.row(row)
    campaign.errors.extend(journal.errors())
    left = [rest for rest in map(journal.rest, work) if rest is not None]
    for _ in range(len(work) - len(left)):
        listener.unit_done()
    return left


def _through(
    made: Executor, work: list[Unit], campaign: Campaign, listener: Listener, journal: Journal | None
) -> None:
    messages = made.run(work)
    try:
        for message in messages:
            _take(message, campaign, listener, journal)
    except KeyboardInterrupt:
        campaign.interrupted = True
    finally:
        messages.close()  # type: ignore[attr-defined]


def _task(plan: Plan, subject: str, name: str, chunk: str, limit: int | None) -> Task:
    task = Task(subject, name, chunk, plan.device, plan.seed, plan.match, limit)
    return replace(task, fresh=plan.fresh, checks=plan.checks, ablate=plan.ablate)


def _chunks(plan: Plan, name: str) -> Iterator[tuple[str, int | None]]:
    """The chunks of a corpus that fall into the plan's shard, each with the most cases to take of it."""
    shard = plan.shard or Shard()
    return ((chunk, most) for chunk, most in _all_chunks(plan, name) if shard.takes(f"{name}::{chunk}"))


def _all_chunks(plan: Plan, name: str) -> Iterator[tuple[str, int | None]]:
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


def _take(message: Message, campaign: Campaign, listener: Listener, journal: Journal | None = None) -> None:
    if isinstance(message, Result):
        _keep(Row.from_json(message.data), message.unit, message.step, campaign, listener, journal)
    elif isinstance(message, Lost):
        step = -1 if message.step is None else message.step
        _keep(lost(message), message.unit, step, campaign, listener, journal)
        if message.step is None:
            _finish(message.unit, "", listener, journal)
    elif isinstance(message, Finished):
        if message.error:
            task = Task(**message.unit.payload)
            campaign.errors.append(f"{task.subject} {task.corpus}::{task.chunk}: {message.error}")
        _finish(message.unit, message.error, listener, journal)


def _keep(
    row: Row, unit: Unit, step: int, campaign: Campaign, listener: Listener, journal: Journal | None
) -> None:
    campaign.rows.append(row)
    listener.row(row)
    if journal is not None:
        journal.write(unit, step, row)


def _finish(unit: Unit, error: str, listener: Listener, journal: Journal | None) -> None:
    if journal is not None:
        journal.finish_unit(unit, error)
    listener.unit_done()


def lost(message: Lost) -> Row:
    """The row of a case that ended its worker."""
    task = Task(**message.unit.payload)
    label = message.label or {"case": f"{task.corpus}::{task.chunk}", "seed": task.seed}
    verdict = Verdict.TIMEOUT if message.why == "timeout" else Verdict.CRASH
    symptom = message.why if message.label else f"{message.why}{OUTSIDE}"
    row = Row(label["case"], label["seed"], task.corpus, task.subject, verdict, symptom, message.detail)
    return replace(row, signature=signature_of(row).digest)
