"""smaller: a divergence made smaller in a worker; a candidate that hangs or crashes costs itself only.

In: a script, the comparison that found the divergence. Out: a `Find`. The worker announces each candidate
before it runs it, and says how far it has come (`Begun`). Where a candidate ends the worker, another worker
goes on from there and leaves that candidate out.

A campaign does this for what it draws, and `smaller_unit` for the one case of `gradparity shrink`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gradparity.ablation.ladders import ladder
from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.generated import scripted
from gradparity.corpus.spelled import spelled
from gradparity.differential import Comparison
from gradparity.executors.unit import Emit, Lost, Result, Started, Unit
from gradparity.exhibit import exhibit
from gradparity.fuzzing.find import Find
from gradparity.generate.script import Script
from gradparity.repro.script import runnable
from gradparity.shrink.features import features
from gradparity.shrink.question import still_diverges
from gradparity.shrink.read import from_source
from gradparity.shrink.shrinker import Question, Shrinker, Shrunk
from gradparity.signature import signature_of
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row
from gradparity.work import Task, compared, judged, quiet

LEAST, TIMES = 5.0, 4.0
"""A candidate may take so many seconds, and so many times what the case took."""


@dataclass(frozen=True)
class Effort:
    """What goes into it: the limit of one run, and of the whole. `blame`: for what the subject answers."""

    device: str
    timeout: float
    seconds: float
    blame: str = Blame.own


@dataclass(frozen=True)
class Begun:
    """How far it has come. `find`: as it was drawn, `best`: the smallest script so far, both in plain data;
    `left`: seconds; `avoid`: digests of what ended a worker.
    """

    find: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    tried: int = 0
    left: float = 0.0
    avoid: tuple[str, ...] = ()


Announce = Callable[[float, Begun], None]
"""Says that a candidate begins: how many seconds it may take, and what is there if it ends the worker."""


class Smaller:
    """Makes one find smaller.

    Arguments: the find as it was drawn, its comparison, the subject, the effort, how far an earlier worker
    came, and who is told of each candidate.
    """

    def __init__(
        self, find: Find, found: Comparison, effort: Effort, begun: Begun | None, announce: Announce
    ) -> None:
        self._find, self._found, self._effort, self._announce = find, found, effort, announce
        self._case = Case.parse(find.address, find.seed)
        self._begun = begun or Begun(find.to_json(), left=effort.seconds)
        self._until = time.monotonic() + self._begun.left
        self._limit = min(effort.timeout, LEAST + TIMES * found.row.seconds)

    def made(self) -> tuple[Find, bool]:
        """The find with the smallest script that diverges alike, and whether no cut was left."""
        made = self._cut() if self._effort.seconds > 0 else Shrunk(self._find.script, 0, False)
        row = self._confirmed(made.script)
        smaller = replace(
            self._find,
            shrunk=made.script,
            signature=signature_of(row, features(made.script)),
            row=row,
            tried=self._begun.tried,
        )
        return smaller, made.done

    def _cut(self) -> Shrunk:
        """Looks for the script under the first stage of the subject that diverges alike, which answers sooner
        than the whole subject; what the subject does not repeat is looked for again under the subject itself.
        """
        script = self._find.script
        best = Script.model_validate(self._begun.best) if self._begun.best else script
        itself = self._question(self._find.subject)
        below = (self._question(rung.subject) for rung in ladder(self._find.subject)[:-1])
        question = next((asked for asked in below if asked(best)), itself)
        made = self._shrunk(question, best)
        if question is itself or itself(made.script):
            return made
        if not self._begun.avoid:
            self._until = max(self._until, time.monotonic() + self._effort.seconds / 2)
        self._begun = replace(self._begun, best={})
        return self._shrunk(itself, script)

    def _shrunk(self, question: Question, script: Script) -> Shrunk:
        def asked(candidate: Script) -> bool:
            self._begun = replace(self._begun, tried=self._begun.tried + 1)
            answer = question(candidate)
            if answer:
                self._begun = replace(self._begun, best=candidate.model_dump(mode="json"))
            return answer

        return Shrinker(asked, self._until - time.monotonic()).shrink(script)

    def _question(self, subject: str) -> Question:
        """Whether a script diverges alike under this subject; no, if that ended a worker."""
        alike = still_diverges(
            self._found, self._case, self._subject(subject), torch.device(self._effort.device), self._limit
        )
        return lambda script: self._may_run(subject, script, self._limit) and alike(script)

    def _confirmed(self, script: Script) -> Row:
        """The row of the shrunk script; that of the one as drawn, if the shrunk one does not repeat it."""
        subject, limit = self._find.subject, self._effort.timeout
        if not self._may_run(f"confirmed {subject}", script, limit):
            return self._find.row
        program, device = scripted(self._case, script), torch.device(self._effort.device)
        row = judged(program, self._subject(subject), device, self._find.row.checks)
        return row if signature_of(row) == signature_of(self._find.row) else self._find.row

    def _subject(self, name: str) -> Subject:
        return resolve(name, Blame(self._effort.blame))

    def _may_run(self, how: str, script: Script, limit: float) -> bool:
        """Whether this did not end a worker; announces it."""
        name = hashlib.blake2b(f"{how}\n{script.source}".encode(), digest_size=8).hexdigest()
        if name in self._begun.avoid:
            return False
        left = max(self._until - time.monotonic() - self._limit, 0.0)
        self._announce(limit, replace(self._begun, left=left, avoid=(*self._begun.avoid, name)))
        return True


def announcer(emit: Emit, step: int, case: Case) -> Announce:
    """Tells the executor of each candidate, as of a part of this step."""

    def announce(limit: float, begun: Begun) -> None:
        label = {"case": case.address, "seed": case.seed, "limit": limit, "begun": asdict(begun)}
        emit("start", step, label)

    return announce


def begun_of(message: Started | Lost | Result) -> Begun | None:
    """How far it had come when a candidate began, or ended its worker; None if it was no candidate."""
    begun = None if isinstance(message, Result) else (message.label or {}).get("begun")
    return None if begun is None else Begun(**begun)


def smaller_unit(unit: Unit, emit: Emit) -> bool:
    """Finds and cuts the one case of a `Task`; see `executors.unit.RunUnit`."""
    payload = dict(unit.payload)
    effort, begun = Effort(**payload.pop("effort")), payload.pop("begun")
    task = Task(**payload)
    quiet()
    case, device = Case.parse(task.case, task.seed), torch.device(task.device)
    subject = resolve(task.subject, Blame(task.blame))
    program = corpora.program(case, device)
    emit("start", 0, {"case": case.address, "seed": case.seed})
    script, found = written(program, subject, device, task.checks)
    if found.row.stocks_own:  # whoever names the case wants it smaller, whosever it is
        effort = replace(effort, blame=Blame.strict)
        script, found = written(program, resolve(task.subject, Blame.strict), device, task.checks)
    data: dict[str, Any] = {"row": found.row.to_json(), "find": None}
    if found.row.is_find:
        before = Begun(**begun) if begun else None
        find = as_drawn(case, script, found)
        made, done = Smaller(find, found, effort, before, announcer(emit, 0, case)).made()
        data |= {"find": made.to_json(), "done": done}
    emit("result", 0, data)
    return True


def written(
    program: Program, subject: Subject, device: torch.device, checks: tuple[str, ...] = ()
) -> tuple[Script, Comparison]:
    """The program as a script, and what the script shows. A sample of a database is written with its shapes
    and arguments, if it then diverges as the sample does. Raises ReproError if the program has no text.
    """
    case, more = program.case, {"fp64": program.fp64, "cold": program.cold, "doc": program.doc}
    if texts := list(spelled(program)):
        wanted = signature_of(compared(program, subject, device, checks, confirm=False).row)
        for text in texts:
            script = from_source(text).model_copy(update=more)
            found = compared(scripted(case, script), subject, device, checks)
            if found.row.is_find and signature_of(found.row) == wanted:
                return script, found
    script = from_source(runnable(program)).model_copy(update=more)
    return script, compared(scripted(case, script), subject, device, checks)


def as_drawn(case: Case, script: Script, found: Comparison) -> Find:
    """The find before anything is cut."""
    row = replace(found.row, exhibit=exhibit(found))
    signature = signature_of(row, features(script))
    return Find(row.subject, case.address, case.seed, script, script, signature, row, 0, torch.__version__)
