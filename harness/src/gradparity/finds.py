"""finds: from what a user names to a find that can be shown, replayed and handed over.

In: a case address or a signature, a subject, a store. Out: the program, the subject, the judged row.
Programs run in a worker process, as in a campaign: one that hangs or crashes costs itself only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradparity.campaign import lost
from gradparity.case import SEPARATOR, Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.folder import PREFIX
from gradparity.corpus.generated import scripted
from gradparity.errors import CaseError, StoreError, UnknownNameError
from gradparity.executors.registry import Resources, executor
from gradparity.executors.unit import Finished, Lost, Result, RunUnit, Started, Unit
from gradparity.fuzzing.find import Find, Folder
from gradparity.fuzzing.smaller import Begun, Effort, begun_of, smaller_unit
from gradparity.store.lines import read_lines
from gradparity.store.merge import is_store
from gradparity.store.store import Store
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row
from gradparity.work import Task, run_unit

Messages = Generator[dict[str, Any], None, None]
GRACE = 5.0
MEMORY = 4 << 30
"""Bytes that a worker may hold while it makes a case smaller on the CPU: a candidate may never end."""


@dataclass(frozen=True)
class Named:
    """A case under a subject. `recorded`: the row that a store holds of it."""

    case: Case
    subject: str
    recorded: Row | None = None

    def checks(self, given: Iterable[str] | None) -> tuple[str, ...]:
        """The checks that are given; without any, the one that found what a store holds."""
        return tuple(given or ()) or (self.recorded.checks if self.recorded is not None else ())


@dataclass(frozen=True)
class Judged:
    """A case that was run again."""

    program: Program
    subject: Subject
    row: Row


def named(text: str, subject: str | None, path: Path | None, seed: int, trust: bool = False) -> Named:
    """What "corpus::name", the file of a find or a signature means; of a store, see `refuse_imports`. Raises
    UnknownNameError or CaseError.
    """
    file = Path(text)
    if path is None and file.suffix == ".json" and SEPARATOR not in text:
        return named(f"{PREFIX}{file.parent}{SEPARATOR}{file.stem}", subject, file.parent, seed, trust)
    if path is None:
        if subject is None:
            raise UnknownNameError(
                "find", text, ["CORPUS::NAME with --subject, the file of a find, or a signature with --store"]
            )
        return Named(Case.parse(text, seed), subject)
    rows = recorded(path)
    key = "case" if SEPARATOR in text else "signature"
    for row in rows:
        if getattr(row, key) == text and subject in (None, row.subject):
            refuse_imports([row], path, trust)
            return Named(Case.parse(row.case, row.seed), row.subject, row)
    known = sorted({getattr(row, key) for row in rows if row.is_find})
    raise UnknownNameError(key, text, known)


def recorded(path: Path) -> list[Row]:
    """The rows of a store, of a file of lines, or of a folder of finds that `fuzz` wrote."""
    if path.is_dir():
        return [
            replace(find.row, case=f"{PREFIX}{path}{SEPARATOR}{find.name}", signature=find.signature.digest)
            for find in Folder(path).finds()
        ]
    if path.is_file() and not is_store(path):
        return read_lines(path)
    with Store(path, create=False) as store:
        return store.rows()


def refuse_imports(rows: Iterable[Row], path: Path, trust: bool) -> None:
    """Raises StoreError if running these rows of a file would import others' code, unless `trust`.
    Programs of a folder of finds are scripts that it holds itself: whoever names it has them run.
    """
    own = str(path) if path.is_dir() else ""
    found = sorted({name for row in rows for name in _imports(row, own)})
    if found and not trust:
        raise StoreError(
            f"to run what {path} names would import code that is not gradparity's: {', '.join(found)}\n"
            "  try    --trust, if you know where the file is from"
        )


def _imports(row: Row, own: str) -> Iterator[str]:
    """What the row's subject and corpus name to be imported: a module, a Python file, a folder, a store."""
    form, _, place = row.subject.partition(":")
    if form == "import" or ":" in place:
        yield f"{place.rpartition(':')[0]} (of the subject {row.subject})"
    if (place := corpora.imported_by(row.case)) and place != own:
        yield f"{place} (of the case {row.case})"


def apart(tasks: list[Task], timeout: float, run: RunUnit = run_unit) -> Messages:
    """What a worker says of each task of one case: its row, and what else `run` tells. Of a case that ended
    its worker, the row that says so. Raises CaseError if a case cannot be set up.
    """
    messages = executor(run, 1, GRACE, Resources()).run([Unit(task.to_json(), timeout) for task in tasks])
    with closing(messages):  # type: ignore[type-var]
        for message in messages:
            if isinstance(message, Result):
                yield message.data
            elif isinstance(message, Lost):
                yield lost(message).to_json()
            elif isinstance(message, Finished) and message.error:
                raise CaseError(message.error)


def judged(task: Task, row: Row) -> Judged:
    """A case that was run, as something that can be handed over."""
    program = corpora.program(Case.parse(task.case, task.seed), torch.device(task.device))
    return Judged(program, resolve(task.subject), row)


def handed_over(find: Find) -> Judged:
    """A find as something that can be handed over."""
    program = scripted(Case.parse(find.address, find.seed), find.shrunk)
    return Judged(program, resolve(find.subject), replace(find.row, signature=find.signature.digest))


def smaller(task: Task, effort: Effort, tell: Callable[[str], None]) -> tuple[Find, bool] | Row:
    """The case's divergence made smaller, and whether no cut was left; the row, if there is nothing to cut.
    `tell` hears of candidates that ended a worker. Raises CaseError if the case cannot be set up.
    """
    begun: Begun | None = None
    held = Resources(memory=MEMORY if task.device == "cpu" else None)
    while True:
        payload = task.to_json() | {"effort": asdict(effort), "begun": begun and asdict(begun)}
        messages = executor(smaller_unit, 1, GRACE, held).run([Unit(payload, effort.timeout)])
        with closing(messages):  # type: ignore[type-var]
            message = next(each for each in messages if not isinstance(each, Started))
        if isinstance(message, Finished):
            raise CaseError(message.error)
        if isinstance(message, Result):
            row, find = Row.from_json(message.data["row"]), message.data["find"]
            return row if find is None else (Find.from_json(find), message.data["done"])
        came = begun_of(message)
        if came is None:
            own = replace(message, unit=Unit(task.to_json(), effort.timeout))
            return lost(own) if begun is None else (Find.from_json(begun.find), False)
        begun = came
        tell(f"a candidate cost its worker, and is left out: {message.detail}")
