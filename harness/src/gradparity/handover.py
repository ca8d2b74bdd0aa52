"""handover: the files that a find leaves: scripts, and a draft of an issue.

In: a judged case, a folder. Out: `repro_<signature>.py`, which observes all that gradparity does;
`short_<signature>.py`, the same as a person would write it; `issue_<signature>.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils import collect_env

from gradparity.errors import CaseError, ReproError
from gradparity.finds import Judged
from gradparity.issue.markdown import Find, markdown
from gradparity.repro.script import runnable, script
from gradparity.repro.short import short
from gradparity.subjects.places import portable, with_neighbours
from gradparity.sweep import DIFFERS, VERSIONS, said
from gradparity.writing import write_text


def write_script(found: Judged, folder: Path, device: torch.device) -> Path:
    """Writes the script. Raises ReproError if there is no form in plain torch."""
    path = folder / f"repro_{label(found)}.py"
    text = script(found.program, found.subject, found.row, device, path.name)
    return write_text(path, portable(text, found.subject.file, folder))


def write_short(found: Judged, folder: Path, tell: Callable[[str], None] = lambda why: None) -> Path | None:
    """Writes the shortest script that differs when it is run, as the row says; None if there is none: `tell`
    hears why.
    """
    path = folder / f"short_{label(found)}.py"
    why = "the program has no short form"
    try:
        for text in short(runnable(found.program), found.subject, found.row):
            write_text(path, portable(text, found.subject.file, folder))
            told = said(Path(sys.executable), path)
            raises = "raise" in found.row.symptom or "exception" in found.row.symptom
            if told.startswith(DIFFERS) and ("raises" not in told or raises):
                return path
            why = f"a short form does not show the difference: {told}"
    except (CaseError, ReproError) as error:
        why = str(error)
    tell(f"no {path.name}: {why}")
    path.unlink(missing_ok=True)
    return None


def write_issue(found: Judged, folder: Path, sweep: dict[str, str]) -> Path:
    """Writes the draft. The scripts must stand in the folder."""
    environment = str(collect_env.get_pretty_env_info())
    program, one = found.program, folder / f"short_{label(found)}.py"
    text = one.read_text(encoding="utf-8") if one.is_file() else runnable(program)
    attached = "" if one.is_file() else f"repro_{label(found)}.py"
    find = Find(found.row, program.doc, text, environment, program.issue, sweep, attached, VERSIONS)
    if (file := found.subject.file) is not None:
        beside = tuple(with_neighbours(file)[1:])
        find = replace(find, backend=(file.name, file.read_text(encoding="utf-8"), *beside))
    draft = markdown(find)
    draft = draft if file is None else draft.replace(str(file), file.name)
    return write_text(folder / f"issue_{label(found)}.md", draft)


def label(found: Judged) -> str:
    """What the files are named for."""
    return found.row.signature or found.program.case.name
