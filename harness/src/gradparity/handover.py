"""handover: the files that a find leaves: a script, and a draft of an issue.

In: a judged case, a folder. Out: `repro_<signature>.py` and `issue_<signature>.md` there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils import collect_env

from gradparity.errors import StoreFullError
from gradparity.finds import Judged
from gradparity.issue.markdown import Find, markdown
from gradparity.repro.script import script


def write_script(found: Judged, folder: Path, device: torch.device) -> Path:
    """Writes the script. Raises ReproError if there is no form in plain torch."""
    path = folder / f"repro_{label(found)}.py"
    return _written(path, script(found.program, found.subject, found.row, device, path.name))


def write_issue(found: Judged, folder: Path, text: str, sweep: dict[str, str]) -> Path:
    """Writes the draft around a script's text."""
    environment = str(collect_env.get_pretty_env_info())
    program = found.program
    draft = markdown(Find(found.row, program.doc, text, environment, program.issue, sweep))
    return _written(folder / f"issue_{label(found)}.md", draft)


def label(found: Judged) -> str:
    """What the files are named for."""
    return found.row.signature or found.program.case.name


def _written(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreFullError(f"cannot write {path}: {error}\n  try    another folder") from error
    return path
