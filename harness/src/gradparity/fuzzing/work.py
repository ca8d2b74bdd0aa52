"""What a worker does: draws, runs, judges, and shrinks what is new.

In: a Unit whose payload is a `FuzzTask` in plain data. Out: for each case its row, how many drawings were
rejected, which passes fired, and a find if the case diverged in a way that nothing known covers.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradparity.alive import is_alive
from gradparity.case import Case
from gradparity.corpus.generated import NAME, scripted
from gradparity.differential import Comparison, compare, confirmed
from gradparity.errors import CaseTimeout, GradparityError
from gradparity.executors.unit import Emit, Unit
from gradparity.exhibit import exhibit
from gradparity.fired import counting
from gradparity.fuzzing.find import Find
from gradparity.fuzzing.smaller import Announce, Begun, Effort, Smaller, announcer, as_drawn
from gradparity.generate.draw import drawn_and_run
from gradparity.generate.script import Script
from gradparity.shrink.features import features
from gradparity.signature import Signature, signature_of
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.registry import resolve
from gradparity.tidy import tidy_now_and_then
from gradparity.verdict import Row, Verdict, row_of
from gradparity.work import alarm, quiet, with_checks

ENOUGH, ONE_IN = 5, 6
"""After so many finds that look alike, one in so many of the others is shrunk."""
STRIDE = 1_000_000
"""Seeds of programs begin at the campaign's seed times this."""
LEFT = 0.25
"""Of the time that is left, so much at most goes into making one program smaller."""
WORN_OUT = 400.0
"""Seconds of the processor after which a worker is replaced by a fresh one: its memory stays bounded."""
BROKEN = "broken-case"
"""The symptom of a case that could not be drawn or judged."""


@dataclass(frozen=True)
class FuzzTask:
    """Cases `start` to `start + count` of a campaign, without those to `skip`. `until`: when the campaign
    ends, as `time.time()` tells it (None: nobody knows). `known` are signatures in plain data; `begun`: how
    far an earlier worker came with making the one case smaller; `blame` and `checks` are as in `Task`.
    """

    subject: str
    device: str
    seed: int
    policies: tuple[str, ...]
    start: int
    count: int
    timeout: float
    shrink_seconds: float
    until: float | None = None
    known: list[dict[str, Any]] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    begun: dict[str, Any] | None = None
    blame: str = Blame.own
    checks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for a Unit's payload."""
        return asdict(self)

    def seconds(self) -> float:
        """The most that goes into making one program smaller now."""
        left = math.inf if self.until is None else LEFT * (self.until - time.time())
        return min(self.shrink_seconds, max(left, 0.0))

    def case(self, number: int) -> Case:
        """The case with this number: the policies take turns, one that stands there twice two in a round."""
        rounds, place = divmod(number, len(self.policies))
        name = self.policies[place]
        turn = rounds * self.policies.count(name) + self.policies[:place].count(name)
        return Case(NAME, name, self.seed * STRIDE + turn)


def fuzz_unit(unit: Unit, emit: Emit) -> bool:
    """Runs the unit's task; see `executors.unit.RunUnit`."""
    task = FuzzTask(**unit.payload)
    subject = resolve(task.subject, Blame(task.blame))
    known = [Signature.from_json(item) for item in task.known]
    quiet()
    for step in range(unit.start, task.count):
        if task.start + step in task.skip:
            continue
        if task.until is not None and time.time() > task.until and task.begun is None:
            return True
        case = task.case(task.start + step)
        allowed = task.timeout * (2 if task.checks else 1)
        emit("start", step, {"case": case.address, "seed": case.seed, "limit": allowed})
        result, fit = _case(case, subject, task, known, announcer(emit, step, case))
        emit("result", step, result)
        tidy_now_and_then(step)
        is_worn_out = time.process_time() > WORN_OUT and step + 1 < task.count
        if not fit or is_worn_out or not is_alive(torch.device(task.device)):
            return False
    return True


def _case(
    case: Case, subject: Subject, task: FuzzTask, known: list[Signature], announce: Announce
) -> tuple[dict[str, Any], bool]:
    """The result in plain data, and whether the process is fit for more."""
    device, script, find = torch.device(task.device), Script(), None
    found: Comparison | None = None
    fired: Counter[str] = Counter()
    is_news = False
    try:
        with alarm(task.timeout), counting() as fired:
            script, shown = drawn_and_run(case.name, case.index or 0)
            first = shown if device.type == "cpu" and case.seed == 0 else None
            program = scripted(case, script)
            found = compare(program, subject, device, confirm=False, first=first)
            if is_news := _is_news(case, script, found.row, task, known):
                found = confirmed(program, found, device)
        with suppress(CaseTimeout), alarm(task.timeout):
            checked = with_checks(found, program, subject, device, task.checks)
            if checked is not found:
                found, is_news = checked, _is_news(case, script, checked.row, task, known)
        row = replace(found.row, exhibit=exhibit(found))
    except CaseTimeout as error:
        row = row_of(case, subject.name, Verdict.TIMEOUT, "timeout", str(error))
    except GradparityError as error:
        row = row_of(case, subject.name, Verdict.CRASH, BROKEN, str(error))
    except Exception as error:  # a fault of the generator or of an oracle costs one case, not the unit
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}, raised by {last.name} in {Path(last.filename).name}"
        row = row_of(case, subject.name, Verdict.CRASH, BROKEN, why)
    begun = time.monotonic()
    if found is not None and is_news and row.is_find and row.symptom != BROKEN:
        find = _find(case, script, found, task, known, announce)
    return {
        "row": row.to_json(),
        "attempt": script.attempt,
        "shrinking": time.monotonic() - begun,
        "fired": dict.fromkeys(fired, 1),
        "diverged": row.is_find and row.symptom != BROKEN,
        "find": None if find is None else find.to_json(),
    }, row.verdict is not Verdict.TIMEOUT


def _is_news(case: Case, script: Script, row: Row, task: FuzzTask, known: list[Signature]) -> bool:
    """Whether it is a find that nothing known covers, and it is looked into: if so many are known that look
    like it, only some of them are.
    """
    if not row.is_find:
        return False
    signature = signature_of(row, features(script))
    alike = sum(item.coarse == signature.coarse for item in known)
    is_tiring = task.shrink_seconds > 0 and alike >= ENOUGH and (case.index or 0) % ONE_IN
    return not (_is_covered(signature, known) or is_tiring)


def _find(
    case: Case,
    script: Script,
    found: Comparison,
    task: FuzzTask,
    known: list[Signature],
    announce: Announce,
) -> Find | None:
    """The find, shrunk and run once more; None if something known covers what is left of it."""
    effort = Effort(task.device, task.timeout, task.seconds(), task.blame)
    begun = Begun(**task.begun) if task.begun else None
    find, _ = Smaller(as_drawn(case, script, found), found, effort, begun, announce).made()
    if _is_covered(find.signature, known):
        return None
    known.append(find.signature)
    return find


def _is_covered(signature: Signature, known: list[Signature]) -> bool:
    return any(item.covers(signature) for item in known)
