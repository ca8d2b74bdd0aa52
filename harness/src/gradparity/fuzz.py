"""fuzz: a campaign of generated programs against one subject.

In: `FuzzOptions`. Out: each distinct divergence through `on_find`, shrunk and run once more; the state of
things through `on_progress` after every case; a `FuzzSummary` in the end. Programs run in worker processes
(or in this one, with `processes=0`); a crash of a worker costs one case.

Two divergences are one if the smaller program covers the larger: it has the same verdict, symptom and place,
and calls nothing that the larger does not. What is covered by something known is counted, not shrunk again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import count as count_from
from typing import Any

from gradparity.case import Case
from gradparity.errors import CaseError
from gradparity.executors.registry import Resources, executor
from gradparity.executors.unit import Lost, Result, Started, Unit
from gradparity.fuzzing.diary import Done
from gradparity.fuzzing.find import Find
from gradparity.fuzzing.smaller import Begun, begun_of
from gradparity.fuzzing.work import BROKEN, FuzzTask, fuzz_unit
from gradparity.generate.draw import policy
from gradparity.generate.policies import ROTATION
from gradparity.signature import Signature
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict, row_of

ROUND_SECONDS = 400.0
"""About how long a worker goes on before it is replaced by a fresh one: its memory stays bounded."""
FIRST_ROUND = 40


@dataclass(frozen=True)
class FuzzOptions:
    """What to run. `minutes` or `cases` says when it ends, whichever comes first. `policies`: names of
    policies (none: all in turn). `known`: divergences that are no news. `shrink_seconds`: the most that goes
    into making one program smaller; 0 leaves them as they are. `done`: what an earlier process did of this
    campaign.
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
    done: Done = field(default_factory=Done)
    resources: Resources = field(default_factory=Resources)


@dataclass
class FuzzSummary:
    """Where a campaign stands. `rejected`: drawings that eager could not run; `repeated`: divergences that
    something known covers; `number`: the last case's; `lost`: cases that cost a worker or could not be
    judged, and candidates that cost one while a case was made smaller; `shrinking`: the seconds that each of
    the `workers` shrank, in the mean; `begun`: how far cases came that are made smaller, by number; `failed`:
    why the last worker ended before its first case; `fired`: how many programs made each pass fire; `new`:
    distinct divergences, `finds` those of them that this process found.
    """

    cases: int = 0
    rejected: int = 0
    repeated: int = 0
    new: int = 0
    seconds: float = 0.0
    shrinking: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    finds: list[Find] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    known: list[Signature] = field(default_factory=list)
    begun: dict[int, Begun] = field(default_factory=dict)
    interrupted: bool = False
    number: int = -1
    failed: str = ""
    workers: int = 1

    @property
    def rejected_share(self) -> float:
        """Rejected drawings, as a share of all."""
        return self.rejected / max(self.rejected + self.cases, 1)

    @property
    def rate(self) -> float:
        """Cases a second, without the time that shrinking took."""
        return self.cases / max(self.seconds - self.shrinking, 1e-9)

    def state(self) -> dict[str, Any]:
        """What goes on counting when the campaign goes on, in plain data; `resumed` is the inverse."""
        return {name: getattr(self, name) for name in COUNTED}

    @classmethod
    def resumed(cls, state: dict[str, Any], known: Iterable[Signature]) -> FuzzSummary:
        """The summary of a campaign that goes on from this state, or begins."""
        made = cls(known=list(known))
        for name in [name for name in COUNTED if name in state]:
            value = state[name]
            setattr(made, name, Counter(value) if isinstance(value, dict) else value)
        return made


COUNTED = ("cases", "rejected", "repeated", "new", "seconds", "shrinking", "verdicts", "fired", "lost")
OnFind = Callable[[Find], None]
OnProgress = Callable[[FuzzSummary, Row | None], None]


def fuzz(options: FuzzOptions, on_find: OnFind, on_progress: OnProgress) -> FuzzSummary:
    """Runs the campaign. An interrupt (Ctrl-C) ends it early with what there is. Raises UnknownNameError for
    a policy or subject that does not exist, CaseError if nothing says when to end.
    """
    if options.minutes is None and options.cases is None:
        raise CaseError("a campaign needs an end\n  try    minutes or cases")
    resolve(options.subject)
    for name in options.policies:
        policy(name)
    summary = FuzzSummary.resumed(options.done.state, options.known)
    summary.workers = max(options.processes, 1)
    started = time.monotonic() - summary.seconds
    try:
        for unit in _rounds(options, summary, started):
            for message in _messages(options, unit):
                summary.seconds = time.monotonic() - started
                row = _take(message, summary, on_find)
                on_progress(summary, row)
                if row is not None and _is_over(options, summary):
                    break
    except KeyboardInterrupt:
        summary.interrupted = True
    summary.seconds = time.monotonic() - started
    return summary


def _rounds(options: FuzzOptions, summary: FuzzSummary, started: float) -> Iterator[list[Unit]]:
    """The units of one round after the other: as many cases as fit into a round's time."""
    done = next(number for number in count_from(0) if number not in options.done.numbers)
    count = FIRST_ROUND if options.processes else 5
    while summary.begun or not _is_over(options, summary):
        while summary.begun:
            number, came = summary.begun.popitem()
            came = replace(came, left=0.0) if _is_over(options, summary) else came
            yield [_unit(options, summary, number, 1, came)]
        if _is_over(options, summary):
            return
        if options.cases is not None:
            count = min(count, max(options.cases - done, 1))
        shares = _shares(count, max(options.processes, 1))
        begun, before = time.monotonic(), summary.cases
        is_new = any(number not in options.done.numbers for number in range(done, done + count))
        starts = [done + sum(shares[:place]) for place in range(len(shares))]
        yield [_unit(options, summary, start, share) for start, share in zip(starts, shares, strict=True)]
        if is_new and summary.cases == before and not (summary.begun or _is_over(options, summary)):
            raise CaseError(f"no case was judged: {summary.failed or 'all workers ended'}")
        done += count
        rate = (summary.cases - before) / max(time.monotonic() - begun, 1e-3)
        if options.processes:
            count = int(min(max(rate * ROUND_SECONDS, FIRST_ROUND), 4 * max(count, FIRST_ROUND)))


def _shares(count: int, processes: int) -> list[int]:
    each, rest = divmod(count, processes)
    return [each + (place < rest) for place in range(processes) if each + (place < rest)]


def _unit(
    options: FuzzOptions, summary: FuzzSummary, start: int, count: int, begun: Begun | None = None
) -> Unit:
    task = FuzzTask(
        subject=options.subject,
        device=options.device,
        seed=options.seed,
        policies=options.policies or ROTATION,
        start=start,
        count=count,
        timeout=options.timeout,
        shrink_seconds=options.shrink_seconds,
        known=[item.to_json() for item in summary.known],
        skip=sorted(number for number in options.done.numbers if start <= number < start + count),
        begun=None if begun is None else asdict(begun),
    )
    return Unit(task.to_json(), options.timeout)


def _messages(options: FuzzOptions, units: list[Unit]) -> Iterator[Any]:
    made = executor(fuzz_unit, options.processes, 10.0, options.resources)
    messages = made.run(units)
    try:
        yield from messages
    finally:
        messages.close()  # type: ignore[attr-defined]


def _take(message: Any, summary: FuzzSummary, on_find: OnFind) -> Row | None:
    if isinstance(message, (Started, Lost, Result)) and message.step is not None:
        summary.number = message.unit.payload["start"] + message.step
        begun = begun_of(message)
        if begun is not None:
            summary.begun[summary.number] = begun
        elif not isinstance(message, Started):
            summary.begun.pop(summary.number, None)
    if isinstance(message, Lost) and message.label is not None:
        return _lost(message, message.label, summary, on_find)
    if not isinstance(message, Result):
        summary.failed = getattr(message, "error", "") or getattr(message, "detail", "") or summary.failed
        return None
    data = message.data
    row = Row.from_json(data["row"])
    if row.symptom == BROKEN:
        summary.lost.append(f"{row.case}: {row.reason}")
    summary.cases += 1
    summary.rejected += data["attempt"]
    summary.shrinking += data["shrinking"] / summary.workers
    summary.verdicts[row.verdict.value] += 1
    summary.fired.update(data["fired"])
    if data["find"] is not None:
        _found(Find.from_json(data["find"]), summary, on_find)
    elif data["diverged"]:
        summary.repeated += 1
    return row


def _found(find: Find, summary: FuzzSummary, on_find: OnFind) -> None:
    """Two workers may find the same within one round."""
    if any(item.covers(find.signature) for item in summary.known):
        summary.repeated += 1
        return
    summary.known.append(find.signature)
    summary.finds.append(find)
    summary.new += 1
    on_find(find)


def _lost(message: Lost, label: dict[str, Any], summary: FuzzSummary, on_find: OnFind) -> Row | None:
    """The row of a case that ended its worker. If that was a candidate for making it smaller, another worker
    goes on with it; if that one cannot, the find stays as it was drawn.
    """
    begun, before = begun_of(message), message.unit.payload["begun"]
    what = label["case"] if begun is None else f"{label['case']}, while it was made smaller"
    summary.lost.append(f"{what}: {message.detail}")
    if begun is not None:
        return None
    summary.cases += 1
    if before is not None:
        find = Find.from_json(before["find"])
        summary.verdicts[find.row.verdict.value] += 1
        _found(find, summary, on_find)
        return find.row
    summary.verdicts["lost"] += 1
    verdict = Verdict.TIMEOUT if message.why == "timeout" else Verdict.CRASH
    subject = message.unit.payload["subject"]
    return row_of(Case.parse(label["case"], label["seed"]), subject, verdict, message.why, message.detail)


def _is_over(options: FuzzOptions, summary: FuzzSummary) -> bool:
    late = options.minutes is not None and summary.seconds >= 60 * options.minutes
    return late or (options.cases is not None and summary.cases >= options.cases)
