"""finds: from what a user names to a find that can be shown, replayed and handed over.

In: a case address or a signature, a subject, a store. Out: the program, the subject, the judged row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gradparity.case import SEPARATOR, Case
from gradparity.corpus import registry as corpora
from gradparity.corpus.base import Program
from gradparity.corpus.folder import PREFIX
from gradparity.errors import UnknownNameError
from gradparity.fuzzing.find import Folder
from gradparity.store.lines import read_lines
from gradparity.store.merge import is_store
from gradparity.store.store import Store
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row
from gradparity.work import judged, with_ablation


@dataclass(frozen=True)
class Named:
    """A case under a subject. `recorded`: the row that a store holds of it."""

    case: Case
    subject: str
    recorded: Row | None = None


@dataclass(frozen=True)
class Judged:
    """A case that was run again."""

    program: Program
    subject: Subject
    row: Row


def named(text: str, subject: str | None, path: Path | None, seed: int) -> Named:
    """What "corpus::name" or a signature means. Raises UnknownNameError or CaseError."""
    if path is None:
        if subject is None:
            raise UnknownNameError("find", text, ["CORPUS::NAME with --subject, or a signature with --store"])
        return Named(Case.parse(text, seed), subject)
    rows = recorded(path)
    key = "case" if SEPARATOR in text else "signature"
    for row in rows:
        if getattr(row, key) == text and subject in (None, row.subject):
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


def again(found: Named, device: torch.device, ablate: bool = False) -> Judged:
    """Runs the case again."""
    program = corpora.program(found.case, device)
    subject = resolve(found.subject)
    row = judged(program, subject, device)
    if ablate and row.is_find:
        row = with_ablation(row, program, device)
    return Judged(program, subject, row)
