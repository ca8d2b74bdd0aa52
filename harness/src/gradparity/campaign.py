"""campaign: subjects × corpora, through the loop, into rows.

In: names of subjects and corpora, limits. Out: a `Campaign` with all rows.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from gradparity import report
from gradparity.case import EVERY, Case, Match
from gradparity.checks.registry import chosen
from gradparity.corpus.registry import corpus
from gradparity.executors.registry import Resources, executor
from gradparity.executors.unit import Finished, Lost, Message, Result, Unit
from gradparity.expected import Expected, Known, KnownFallback
from gradparity.loop import Ending, Where, through
from gradparity.shard import Shard
from gradparity.signature import signature_of
from gradparity.store.store import CaseDone, Entry, Progress, UnitDone
from gradparity.subjects.base import Blame
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict
from gradparity.work import Task, run_unit

LOCAL = Resources()
EAGER, ASIDE = "eager", "set-aside"
LEAST = 30.0
"""So many seconds does eager alone have at least: a busy machine must not excuse a subject."""
LATE = " (timed out)"
"""How the unit of an entry ends that says which case is tried once more."""
OUTSIDE = "-outside-case"
"""How the symptom ends of what ended a worker before it had a program."""


@dataclass(frozen=True)
class Plan:
    """What to run. `limit_per_corpus` spreads the cases evenly over a corpus's chunks; `processes` 0 means
    in this one; `shuffle` decides their order, and so which cases meet in a process; `fresh`, `checks`,
    `ablate` and `blame` are as in `Task`; `resources` say where units run.
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
    blame: Blame = Blame.own
    resources: Resources = field(default_factory=Resources)

    @property
    def sampled(self) -> bool:
        """Whether some cases of the corpora are left out."""
        return self.limit_per_corpus is not None or self.match != EVERY or self.shard is not None

    def identity(self) -> dict[str, Any]:
        """What decides the results, in plain data: not where, in which order and by how many processes
        it is done.
        """
        data = asdict(self) | {"shard": str(self.shard) if self.shard else None}
        for name in ("processes", "grace", "resources", "shuffle"):
            del data[name]
        return data

    @property
    def campaign(self) -> str:
        """A digest of the plan, the same for all of its shards."""
        data = json.dumps(self.identity() | {"shard": None}, sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=8).hexdigest()


@dataclass
class Campaign:
    """All rows, which subjects answer for their divergences, and what could not be loaded. `total`: how many
    units there are, `ended` those that are finished; `found`: the divergences; `until`: when no more units
    begin, by the clock `time.monotonic` (None: when all have ended).
    """

    rows: list[Row] = field(default_factory=list)
    accountable: frozenset[str] = frozenset()
    errors: list[str] = field(default_factory=list)
    stale: list[Expected | KnownFallback] = field(default_factory=list)
    ending: Ending = field(default_factory=Ending)
    total: int = 0
    ended: set[str] = field(default_factory=set)
    verdicts: Counter[str] = field(default_factory=Counter)
    found: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    until: float | None = None

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
        if self.ending.broken:
            return 3
        if self.ending.interrupted:
            return 2
        if self.unexpected or self.unlisted or self.stale or self.errors:
            return 1
        return 0 if self.rows else 5

    @property
    def completed(self) -> int:
        """Finished units."""
        return len(self.ended)

    def describe(self) -> str:
        """One line."""
        now, rest = time.monotonic(), []
        if self.ended:
            rest.append((now - self.began) / len(self.ended) * (self.total - len(self.ended)))
        if self.until is not None:
            rest.append(max(self.until - now, 0))
        left = f", about {min(rest):.0f} s left" if rest else ""
        counted = ", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())
        told = f"{len(self.rows)} cases: {counted or 'none yet'}; {len(self.found)} divergences"
        return f"{len(self.ended)}/{self.total} units{left}; {told}"


class Corpora:
    """The source of a campaign over corpora: one unit for each subject and chunk. A case that timed out runs
    once more when all others are done, and alone: only that says that it takes too long.
    """

    run_unit = staticmethod(run_unit)

    def __init__(self, plan: Plan, campaign: Campaign) -> None:
        self._plan, self._campaign = plan, campaign
        self._units = self.planned()
        self._steps: Counter[str] = Counter()
        self._late: dict[tuple[str, int], Row] = {}
        self._alone: tuple[str, int] | None = None
        campaign.total = len(self._units)

    def planned(self) -> list[Unit]:
        """The units of the plan."""
        return units(self._plan)

    def rounds(self) -> Iterator[list[Unit]]:
        """All units that are not finished, from the first step that is not; then each case that timed out. If
        the campaign's own time is up, such a case is not run again.
        """
        left = [
            replace(unit, start=self._steps[name])
            for unit in self._units
            if (name := unit_name(unit)) not in self._campaign.ended
        ]
        if self._plan.shuffle is not None:
            random.Random(self._plan.shuffle).shuffle(left)
        yield left
        for key, row in list(self._late.items()):
            if self.is_over():
                self.count(CaseDone(*key, row))
                continue
            self._alone = key
            case, plan = Case.parse(row.case, row.seed), self._plan
            task = Task.of(case, row.subject, plan.device, plan.ablate, plan.checks)
            yield [Unit(replace(task, blame=plan.blame).to_json(), plan.timeout)]

    def entries(self, message: Message) -> Iterator[Entry]:
        """A row for each case, and the end of each unit."""
        name = unit_name(message.unit)
        if isinstance(message, (Result, Lost)):
            row = Row.from_json(message.data) if isinstance(message, Result) else _row_of_lost(message)
            step = -1 if message.step is None else message.step
            is_late = row.verdict is Verdict.TIMEOUT and step >= 0 and self._alone is None
            if isinstance(message, Lost) and not is_late:
                row = lost(message, self._plan.grace, self._plan.resources)
            if is_late:
                yield CaseDone(f"{name}{LATE}", step, None, row.to_json())
            elif self._alone is not None:
                before = f"beside other cases: {self._late[self._alone].reason}"
                yield CaseDone(*self._alone, replace(row, notes=(*row.notes, before)))
            else:
                yield CaseDone(name, step, row)
            if message.step is None:
                yield UnitDone(name)
        elif isinstance(message, Finished) and self._alone is None:
            yield UnitDone(name, message.error)

    def count(self, entry: Entry) -> None:
        """Counts a row, or the end of a unit."""
        campaign = self._campaign
        if isinstance(entry, UnitDone):
            campaign.ended.add(entry.unit)
            campaign.errors += [f"{entry.unit}: {entry.error}"] if entry.error else []
        elif entry.unit.endswith(LATE):
            name = entry.unit.removesuffix(LATE)
            self._steps[name] = max(self._steps[name], entry.step + 1)
            self._late[name, entry.step] = Row.from_json(entry.facts)
        elif entry.row is not None:
            self._late.pop((entry.unit, entry.step), None)
            self._steps[entry.unit] = max(self._steps[entry.unit], entry.step + 1)
            campaign.rows.append(entry.row)
            campaign.verdicts[report.column(entry.row)] += 1
            campaign.found += [entry.row] if entry.row.is_find else []

    def is_over(self) -> bool:
        """Never before its units are finished."""
        return False


def units(plan: Plan) -> list[Unit]:
    """The plan as units of work, one per subject and chunk. Raises UnknownNameError or UnavailableError."""
    chosen(plan.checks)
    return [
        Unit(task.to_json(), plan.timeout)
        for name in plan.corpora
        for chunk, limit in _chunks(plan, name)
        for task in (_task(plan, subject, name, chunk, limit) for subject in plan.subjects)
    ]


def unit_name(unit: Unit) -> str:
    """What a unit is called in a store: its subject, corpus and chunk."""
    task = unit.payload
    return f"{task['subject']} {task['corpus']}::{task['chunk']}"


def run(
    plan: Plan,
    known: Known | None = None,
    listen: Callable[[Campaign, Entry | None], None] = lambda campaign, entry: None,
    progress: Progress | None = None,
    source: Callable[[Plan, Campaign], Corpora] = Corpora,
) -> Campaign:
    """Runs the plan, its units as the source plans them. Without a file of what is known, fallbacks are held
    against nobody. An interrupt (Ctrl-C) ends it early with the rows so far; with a store, the next run
    continues there.
    """
    accountable = frozenset(name for name in plan.subjects if resolve(name, plan.blame).accountable)
    campaign = Campaign(accountable=accountable)
    where = Where(plan.processes, plan.grace, plan.resources)
    campaign.ending = through(source(plan, campaign), where, partial(listen, campaign), progress)
    if known is not None:
        campaign.rows = known.mark(campaign.rows, accountable)
        complete = not campaign.ending.interrupted
        campaign.stale = (
            known.stale(campaign.rows, sampled=plan.sampled or source is not Corpora) if complete else []
        )
    return campaign


def _task(plan: Plan, subject: str, name: str, chunk: str, limit: int | None) -> Task:
    task = Task(subject, name, chunk, plan.device, plan.seed, plan.match, limit)
    return replace(task, fresh=plan.fresh, checks=plan.checks, ablate=plan.ablate, blame=plan.blame)


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


def lost(message: Lost, grace: float = 10.0, resources: Resources = LOCAL) -> Row:
    """The row of a case that ended its worker. It counts against the subject only if eager alone, in a
    worker of its own, does not end in the same way.
    """
    row, task = _row_of_lost(message), Task(**message.unit.payload)
    if message.label and task.subject != EAGER:
        case = Case.parse(row.case, row.seed)
        eager = Unit(Task.of(case, EAGER, task.device).to_json(), max(message.unit.timeout, LEAST))
        for loss in executor(run_unit, 1, grace, resources).run([eager]):
            if isinstance(loss, Lost) and loss.label and loss.why == message.why:
                reason = f"eager alone ends its worker, too: {loss.detail}"
                return replace(row, verdict=Verdict.UNSUPPORTED, symptom=ASIDE, reason=reason, set_aside=True)
    return row


def _row_of_lost(message: Lost) -> Row:
    task = Task(**message.unit.payload)
    label = message.label or {"case": f"{task.corpus}::{task.chunk}", "seed": task.seed}
    verdict = Verdict.TIMEOUT if message.why == "timeout" else Verdict.CRASH
    symptom = message.why if message.label else f"{message.why}{OUTSIDE}"
    row = Row(label["case"], label["seed"], task.corpus, task.subject, verdict, symptom, message.detail)
    return replace(row, signature=signature_of(row).digest)
