"""work: what a worker does with one unit: one subject over one chunk of a corpus.

In: a Unit whose payload is a `Task` in plain data. Out: rows in plain data, by way of `emit`. Each case has
an alarm.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from gradparity.ablation.ablate import ablate
from gradparity.alive import is_alive
from gradparity.case import EVERY, Case, Match
from gradparity.checks.registry import chosen
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.spelled import spelled
from gradparity.differential import Comparison, compare
from gradparity.errors import CaseTimeout, ReproError
from gradparity.executors.unit import Emit, Unit
from gradparity.exhibit import exhibit
from gradparity.limit import Limit
from gradparity.repro.script import runnable
from gradparity.repro.short import short
from gradparity.signature import signature_of
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.registry import resolve
from gradparity.tidy import tidy_now_and_then
from gradparity.verdict import Row, Verdict, row_of

NOISY = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._precompile",
    "torch._subclasses",
    "torch.fx.experimental.symbolic_shapes",
    "transformers",
)
MOST_TEXT = 4000
"""So long may a program be that a row carries."""


@dataclass(frozen=True)
class Task:
    """One subject over one chunk: at most `limit` cases (None: all) of those that a glob of `match` takes.
    `fresh`: a process for each case. `checks`: what else to check of a case that agrees. `ablate`: say which
    stage breaks a case that diverges. `case`: an address; of the whole corpus, this case alone. `blame`: for
    what the subject answers.
    """

    subject: str
    corpus: str
    chunk: str
    device: str
    seed: int
    match: tuple[str, ...] = EVERY
    limit: int | None = None
    fresh: bool = False
    checks: tuple[str, ...] = ()
    ablate: bool = False
    case: str = ""
    blame: str = Blame.own

    @classmethod
    def of(
        cls, case: Case, subject: str, device: str, ablate: bool = False, checks: tuple[str, ...] = ()
    ) -> Task:
        """One case, wherever it stands in its corpus."""
        corpus, name, seed = case.corpus, case.name, case.seed
        return cls(subject, corpus, name, device, seed, checks=checks, ablate=ablate, case=case.address)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a Unit's payload."""
        return asdict(self)


def run_unit(unit: Unit, emit: Emit) -> bool:
    """Runs the unit's task; see `executors.unit.RunUnit`."""
    task = Task(**unit.payload)
    subject = _subject(task.subject, task.blame)
    quiet()
    programs = list(_programs(task))
    allowed = unit.timeout * (2 if task.ablate or task.checks else 1)
    for step, program in list(enumerate(programs))[unit.start :]:
        case = program.case
        label = {"case": case.address, "seed": case.seed, "limit": allowed}
        emit("start", step, label)
        row, fit = _row(program, subject, task, unit.timeout)
        emit("result", step, row.to_json())
        tidy_now_and_then(step)
        is_used_up = task.fresh and step + 1 < len(programs)
        if not fit or is_used_up or not is_alive(torch.device(task.device)):
            return False
    return True


def _programs(task: Task) -> Iterator[Program]:
    if task.case:
        yield corpora.program(Case.parse(task.case, task.seed), torch.device(task.device))
        return
    match, taken = Match(tuple(task.match)), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = list(
            corpora.corpus(task.corpus).programs(task.chunk, torch.device(task.device), task.seed)
        )
    for program in programs:
        if match.takes(program.case) and (task.limit is None or taken < task.limit):
            taken += 1
            yield program


def _row(program: Program, subject: Subject, task: Task, timeout: float) -> tuple[Row, bool]:
    """The row, and whether the process is fit for more. Checks and the ablation have the same time again."""
    device = torch.device(task.device)
    try:
        with alarm(timeout):
            found = compare(program, subject, device)
    except CaseTimeout as error:
        row = row_of(program.case, subject.name, Verdict.TIMEOUT, "timeout", str(error))
        return replace(row, signature=signature_of(row).digest), False
    try:
        with alarm(timeout):
            row = _looked_into(found, program, subject, task)
    except CaseTimeout:
        row = explained(found)
        return replace(row, notes=(*row.notes, "checks or ablation: no time left")), False
    return row, True


def judged(program: Program, subject: Subject, device: torch.device, checks: tuple[str, ...] = ()) -> Row:
    """The row of a program, with what a report shows of it."""
    return with_program(explained(compared(program, subject, device, checks)), program, subject)


def compared(
    program: Program,
    subject: Subject,
    device: torch.device,
    checks: tuple[str, ...] = (),
    confirm: bool = True,
) -> Comparison:
    """As `differential.compare`, which see; the row of a case that agrees is that of these checks."""
    return with_checks(compare(program, subject, device, confirm), program, subject, device, checks)


def with_checks(
    found: Comparison, program: Program, subject: Subject, device: torch.device, names: tuple[str, ...]
) -> Comparison:
    """The comparison; if the case agrees, with the first finding of these checks as its verdict."""
    is_asked = found.row.verdict is Verdict.AGREE
    for name, check in chosen(tuple(names)).items() if is_asked else ():
        told = check(program, subject, device)
        if told is not None:
            row = replace(found.row, check=name, **asdict(told))
            return replace(found, row=replace(row, signature=signature_of(row).digest))
    return found


def with_program(row: Row, program: Program, subject: Subject) -> Row:
    """The row of a find with the program's text, and a short script to copy, as far as there are such."""
    if not row.is_find:
        return row
    shown = dict(row.exhibit)
    with suppress(ReproError, SyntaxError):
        shown["program"] = next(spelled(program), None) or runnable(program)
        shown["script"] = next(short(shown["program"], subject, row))
    return replace(row, exhibit={key: text for key, text in shown.items() if fits(text)})


def fits(shown: Any) -> bool:
    """Whether a report has room for this."""
    return not isinstance(shown, str) or len(shown) <= MOST_TEXT


def explained(comparison: Comparison) -> Row:
    """The row with what a report shows of it."""
    row = replace(comparison.row, exhibit=exhibit(comparison))
    return replace(row, signature=signature_of(row).digest) if row.is_find else row


def _looked_into(found: Comparison, program: Program, subject: Subject, task: Task) -> Row:
    """The row after the checks that were asked for, or after the ablation."""
    device = torch.device(task.device)
    row = with_program(explained(with_checks(found, program, subject, device, task.checks)), program, subject)
    if row.is_find and task.ablate:
        row = with_ablation(row, program, device, subject.stock.stage if subject.stock else "")
    return row


def with_ablation(row: Row, program: Program, device: torch.device, stock: str = "") -> Row:
    """The row, which is not stock's own, with the stage and the operator that break the case. The stage comes
    after the one that is called `stock`.
    """
    asked = partial(compared, checks=row.checks)
    found = ablate(program, row.subject, device, beyond=stock, asked=asked)
    shown = {**row.exhibit, "ablation": found.to_json()}
    row = replace(row, stage=found.stage or row.stage, operator=found.operator, exhibit=shown)
    return replace(row, signature=signature_of(row).digest)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises CaseTimeout inside the block when this `Limit` is over (in the main thread, where there are
    alarms).
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    limit = Limit(seconds)

    def ring(signum: int, frame: Any) -> None:
        if limit.is_over():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise CaseTimeout(f"longer than {seconds:g} s: {limit.describe()}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds / 4, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _subject(name: str, blame: str) -> Subject:
    return resolve(name, Blame(blame))


def quiet() -> None:
    """Compilers log every refusal; here a refusal is a result."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
