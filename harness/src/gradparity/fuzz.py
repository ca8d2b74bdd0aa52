"""fuzz: a campaign of generated programs against one subject.

In: `FuzzOptions`, a run in a store. Out: a `FuzzSummary`, with each distinct divergence shrunk and run once
more. Programs run in worker processes (or in this one, with `processes=0`); a crash of a worker costs one
case.

Two divergences are one if the smaller program covers the larger: it has the same verdict, symptom and place,
and calls nothing that the larger does not. What is covered by something known is counted, not shrunk again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count as count_from
from typing import Any

from gradparity.case import Case
from gradparity.checks.registry import COSTS, chosen
from gradparity.errors import CaseError
from gradparity.executors.registry import Resources
from gradparity.executors.unit import Finished, Lost, Message, Result, Started, Unit
from gradparity.fuzzing.find import Find
from gradparity.fuzzing.smaller import Begun, begun_of
from gradparity.fuzzing.work import BROKEN, FuzzTask, fuzz_unit
from gradparity.generate.draw import policy
from gradparity.generate.policies import LARGE_ROTATION, ROTATION
from gradparity.loop import Ending, Where, through
from gradparity.reading import read_as
from gradparity.signature import Signature, signature_of
from gradparity.store.store import CaseDone, Entry, Progress
from gradparity.subjects.base import Blame
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict, row_of

ROUND_SECONDS = 400.0
"""About how long a round takes."""
FIRST_ROUND = 400
"""No round has fewer cases: each begins with fresh workers, which takes seconds."""
GRACE = 10.0
"""Seconds that a campaign waits at its end for what is being made smaller."""
SHARE = 10
"""A worker is given so many cases at a time, and with them what is known by then."""
WITHOUT_FIND = ("timeout", "crash", "out-of-memory", BROKEN)
"""Symptoms of divergences that cannot be shrunk, because the process did not outlive them."""


@dataclass(frozen=True)
class FuzzOptions:
    """What to run. `minutes` or `cases` says when it ends, whichever comes first. `policies`: names of
    policies (none: all in turn, `stacks` before each if `checks` measure costs). `known`: divergences that
    are no news. `shrink_seconds`: the most that goes into making one program smaller; 0 leaves them as they
    are. `checks`: as in `Task`.
    """

    subject: str
    seed: int = 0
    minutes: float | None = None
    cases: int | None = None
    policies: tuple[str, ...] = ()
    device: str = "cpu"
    processes: int = 1
    timeout: float = 60.0
    shrink_seconds: float = 60.0
    known: tuple[Signature, ...] = ()
    resources: Resources = field(default_factory=Resources)
    blame: Blame = Blame.own
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a campaign counts of one case. `verdict`: "lost" if it ended its worker; `rejected`: drawings that
    eager could not run; `repeated`: whether something known covers its divergence; `shrinking`: seconds, in
    the mean over the workers; `seconds`: of the campaign so far; `fired`: passes; `lost`: what cost a worker,
    or could not be judged; `find`: a new divergence; `kind`: the digest of what a divergence, new or known,
    looks like.
    """

    verdict: str
    rejected: int = 0
    repeated: bool = False
    shrinking: float = 0.0
    seconds: float = 0.0
    fired: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    find: Find | None = None
    kind: str = ""


@dataclass
class FuzzSummary:
    """Where a campaign stands: the sums of all `Facts`. `rows`: what a report shows; `numbers`: of the cases
    that are done; `known`: divergences that are no news any more; `begun`: those that are being made smaller,
    by the number of their case; `workers`: how many there are; `kinds`: how many cases diverged, by kind.
    """

    cases: int = 0
    rejected: int = 0
    repeated: int = 0
    seconds: float = 0.0
    shrinking: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    finds: list[Find] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    known: list[Signature] = field(default_factory=list)
    begun: dict[int, Find] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    ending: Ending = field(default_factory=Ending)
    workers: int = 1
    total: float | None = None
    by_time: bool = False

    @property
    def completed(self) -> float:
        """Of `total`."""
        return self.seconds if self.by_time else self.cases

    @property
    def found(self) -> list[Row]:
        """The rows of the finds."""
        return [find.row for find in self.finds]

    @property
    def rejected_share(self) -> float:
        """Rejected drawings, as a share of all."""
        return self.rejected / max(self.rejected + self.cases, 1)

    @property
    def rate(self) -> float:
        """Cases a second, without the time that shrinking took."""
        return self.cases / max(self.seconds - self.shrinking, 1e-9)

    def count(self, number: int, row: Row | None, facts: Facts) -> None:
        """Adds one case."""
        self.numbers.add(number)
        self.begun.pop(number, None)
        self.rows += [] if row is None else [row]
        self.cases += 1
        self.rejected += facts.rejected
        self.repeated += facts.repeated
        self.shrinking += facts.shrinking
        self.seconds = facts.seconds
        self.verdicts[facts.verdict] += 1
        self.fired.update(facts.fired)
        self.kinds.update([facts.kind] if facts.kind else [])
        self.lost += facts.lost
        if facts.find is not None:
            self.finds.append(facts.find)
            self.known.append(facts.find.signature)

    def is_known(self, find: Find) -> bool:
        """Whether something known covers it; two workers may find the same within one round."""
        return any(item.covers(find.signature) for item in self.known)

    def finds_by_kind(self) -> list[tuple[list[Find], int]]:
        """The finds that look alike, with how many cases do, the most frequent first."""
        found: dict[str, list[Find]] = {}
        for find in self.finds:
            found.setdefault(find.signature.coarse.digest, []).append(find)
        counted = [(alike, max(self.kinds[kind], len(alike))) for kind, alike in found.items()]
        return sorted(counted, key=lambda item: -item[1])

    def describe(self) -> str:
        """One line."""
        counted = ", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())
        own = sum(row.stocks_own for row in self.rows)
        return (
            f"{self.seconds:.0f} s, {self.cases} cases ({self.rate:.1f} a second, "
            f"{self.rejected_share:.1%} of drawings rejected): {counted or 'none yet'}; "
            f"{len(self.finds)} new, {self.repeated} known divergences"
            + (f", {own} stock's own" if own else "")
        )


Listener = Callable[[FuzzSummary, Entry | None], None]


def fuzz(options: FuzzOptions, listen: Listener, progress: Progress | None = None) -> FuzzSummary:
    """Runs the campaign. An interrupt (Ctrl-C) ends it early with what there is. Raises UnknownNameError for
    a policy or subject that does not exist, CaseError if nothing says when to end.
    """
    if options.minutes is None and options.cases is None:
        raise CaseError("a campaign needs an end\n  try    minutes or cases")
    resolve(options.subject, options.blame)
    chosen(options.checks)
    for name in options.policies:
        policy(name)
    source = Drawn(options)
    where = Where(options.processes, resources=options.resources)
    source.summary.ending = through(source, where, partial(listen, source.summary), progress)
    source.look_at_the_clock()
    return source.summary


class Drawn:
    """The source of a campaign of generated programs: a step for each number of a case."""

    run_unit = staticmethod(fuzz_unit)

    def __init__(self, options: FuzzOptions) -> None:
        self._options = options
        by_time = options.minutes is not None
        self.summary = FuzzSummary(
            known=[*options.known],
            workers=max(options.processes, 1),
            total=60 * options.minutes if options.minutes is not None else options.cases,
            by_time=by_time,
        )
        self._started: float | None = None
        self._begun: dict[int, Begun] = {}
        self._lost: dict[int, tuple[str, ...]] = {}
        self._late: dict[int, CaseDone] = {}
        self._alone: int | None = None
        self._known = [item.to_json() for item in options.known]  # shared by all units: it grows
        self._failed = ""

    def look_at_the_clock(self) -> float:
        """The seconds of the campaign, with those of the process that it continues."""
        if self._started is None:
            self._started = time.monotonic() - self.summary.seconds
        self.summary.seconds = time.monotonic() - self._started
        return self.summary.seconds

    def is_over(self) -> bool:
        """Whether the time is up, or enough cases are judged. What is being made smaller then has little left
        to do.
        """
        options, summary = self._options, self.summary
        left = math.inf if options.minutes is None else 60 * options.minutes - summary.seconds
        late = left <= -GRACE or (left <= 0 and not self._begun)
        return late or (options.cases is not None and summary.cases >= options.cases)

    def rounds(self) -> Iterator[list[Unit]]:
        """As many cases as fit into a round's time; before them, the cases that ended a worker while
        they were made smaller, and those that timed out, each alone.
        """
        options, summary = self._options, self.summary
        self.look_at_the_clock()
        done = next(number for number in count_from(0) if number not in summary.numbers)
        count = FIRST_ROUND if options.processes else 5
        while self._begun or self._late or not self.is_over():
            while self._late:
                self._alone, entry = self._late.popitem()
                if self.is_over():
                    self.count(entry)
                else:
                    yield [self._unit(self._alone, 1)]
            self._alone = None
            while self._begun:
                number, came = self._begun.popitem()
                came = replace(came, left=0.0) if self.is_over() else came
                yield [self._unit(number, 1, came)]
            if self.is_over():
                return
            if options.cases is not None:
                count = min(count, max(options.cases - done, 1))
            begun, before = time.monotonic(), summary.cases
            is_new = any(number not in summary.numbers for number in range(done, done + count))
            share, end = SHARE if options.processes else count, done + count
            yield [self._unit(start, min(share, end - start)) for start in range(done, end, share)]
            if is_new and summary.cases == before and not (self._begun or self._late or self.is_over()):
                raise CaseError(f"no case was judged: {self._failed or 'all workers ended'}")
            done += count
            rate = (summary.cases - before) / max(time.monotonic() - begun, 1e-3)
            if options.processes:
                count = int(min(max(rate * ROUND_SECONDS, FIRST_ROUND), 4 * max(count, FIRST_ROUND)))

    def entries(self, message: Message) -> Iterator[CaseDone]:
        """A step for each case that is judged or lost. A case that is being made smaller when its worker ends
        is neither: another worker continues with it.
        """
        self.look_at_the_clock()
        if isinstance(message, Finished) or message.step is None:
            why = message.error if isinstance(message, Finished) else message.detail
            self._failed = why or self._failed
            return
        number, begun = message.unit.payload["start"] + message.step, begun_of(message)
        if begun is not None:
            self._begun[number] = begun
            self.summary.begun.setdefault(number, Find.from_json(begun.find))
        elif not isinstance(message, Started):
            self._begun.pop(number, None)
        if isinstance(message, Result):
            yield from self._if_final(self._judged(number, message.data))
        elif isinstance(message, Lost) and message.label is not None:
            what = message.label["case"] + ("" if begun is None else ", while it was made smaller")
            self._lost[number] = (*self._lost.get(number, ()), f"{what}: {message.detail}")
            if begun is None:
                yield from self._if_final(self._ended(number, message, message.label))
        elif isinstance(message, Lost):
            self._failed = message.detail

    def _if_final(self, entry: CaseDone) -> Iterator[CaseDone]:
        """The entry, unless its case timed out beside others: that one is judged when it has run alone."""
        timed_out = entry.row is not None and entry.row.verdict is Verdict.TIMEOUT
        if timed_out and self._alone is None:
            self._late[entry.step] = entry
        else:
            yield entry

    def count(self, entry: Entry) -> None:
        """Counts a case."""
        if isinstance(entry, CaseDone):
            facts = read_as(Facts, entry.facts)
            self.summary.count(entry.step, entry.row, facts)
            self._known += [] if facts.find is None else [facts.find.signature.to_json()]

    def _judged(self, number: int, data: dict[str, Any]) -> CaseDone:
        row = Row.from_json(data["row"])
        facts = Facts(
            row.verdict.value,
            rejected=data["attempt"],
            shrinking=data["shrinking"] / self.summary.workers,
            fired=tuple(data["fired"]),
            lost=(f"{row.case}: {row.reason}",) if row.symptom == BROKEN else (),
        )
        find = None if data["find"] is None else Find.from_json(data["find"])
        return self._step(number, row, facts, find, data["diverged"])

    def _ended(self, number: int, message: Lost, label: dict[str, Any]) -> CaseDone:
        """A case that ended its worker. If another had already found its divergence, that stays as it was
        drawn.
        """
        before = message.unit.payload["begun"]
        if before is not None:
            find = Find.from_json(before["find"])
            return self._step(number, find.row, Facts(find.row.verdict.value), find, True)
        verdict = Verdict.TIMEOUT if message.why == "timeout" else Verdict.CRASH
        case = Case.parse(label["case"], label["seed"])
        row = row_of(case, self._options.subject, verdict, message.why, message.detail)
        return self._step(number, row, Facts("lost"), None, False)

    def _step(self, number: int, row: Row, facts: Facts, find: Find | None, diverged: bool) -> CaseDone:
        """The entry of a case. Of a divergence, the row is what its find says, so that a report shows the
        shrunk program.
        """
        new = find if find is not None and not self.summary.is_known(find) else None
        shown: Row | None = row
        if new is not None:
            shown = replace(new.row, case=new.address, signature=new.signature.digest)
        elif row.is_find and row.symptom not in WITHOUT_FIND:
            shown = None
        facts = replace(
            facts,
            repeated=diverged and new is None,
            kind=signature_of(row).digest if diverged else "",
            seconds=self.summary.seconds,
            lost=(*self._lost.pop(number, ()), *facts.lost),
            find=new,
        )
        plain = {**vars(facts), "find": None if new is None else new.to_json()}
        return CaseDone("", number, shown, plain)

    def _unit(self, start: int, count: int, begun: Begun | None = None) -> Unit:
        options, summary = self._options, self.summary
        in_turn = LARGE_ROTATION if COSTS & chosen(options.checks).keys() else ROTATION
        task = FuzzTask(
            subject=options.subject,
            device=options.device,
            seed=options.seed,
            policies=options.policies or in_turn,
            start=start,
            count=count,
            timeout=options.timeout,
            shrink_seconds=options.shrink_seconds,
            until=None if options.minutes is None else time.time() + 60 * options.minutes - summary.seconds,
            skip=sorted(summary.numbers.intersection(range(start, start + count))),
            begun=None if begun is None else asdict(begun),
            blame=options.blame,
            checks=options.checks,
        )
        return Unit(task.to_json() | {"known": self._known}, options.timeout)
