"""script: puts a repro together.

In: a program, a subject, a row. Out: the text of a script in plain torch: a heading that says what is
wrong, the program, how the subject is called, the recorder of `standalone.py`.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from textwrap import fill

import torch

from gradparity.corpus.base import Program
from gradparity.errors import ReproError
from gradparity.repro import standalone
from gradparity.repro.sources import Source, source_of, source_of_call
from gradparity.subjects.base import Subject
from gradparity.subjects.places import needed
from gradparity.verdict import Row

SETTINGS, MARK, END = "# --- settings ---", "# --- program ---", "# --- recorder ---"
FUNCTIONS = (
    ("by_subject", "target", "target"),
    ("around_backward", "", "contextlib.nullcontext()"),
    ("around_program", "", "contextlib.nullcontext()"),
)
"""What the recorder calls of a subject, and what it does in eager."""

USAGE = """
  python {name}             print what both show; exit status 1 while they differ
  python {name} check       compare only; exit status 5 if the subject cannot be imported
  python {name} --unittest  a torch TestCase that fails while they differ
  python {name} --minify    write a shorter script beside this one"""


def script(program: Program, subject: Subject, row: Row, device: torch.device, name: str = "repro.py") -> str:
    """The text. Raises ReproError if the program or the subject has no form in plain torch."""
    source, entry = _program(program)
    taken = (set(source.definitions) & set(vars(standalone))) - {"program"}
    if taken:
        raise ReproError(f"{program.case.address} defines {sorted(taken)}, names of the recorder")
    text = inspect.getsource(standalone)
    imports = "from __future__" + text.partition("from __future__")[2].partition(SETTINGS)[0]
    imports = "\n".join([imports.strip(), *_new(source, imports)])
    settings = "\n".join(f"{key} = {value}" for key, value in _settings(program, subject, device).items())
    parts = [
        f'"""{_heading(program, subject, row, name)}\n"""\n\n{imports}\n\n{settings}',
        called(subject),
        f"{MARK}\n\n{source.text()}\n\n\nPROGRAM = {entry}",
        END + text.partition(END)[2],
    ]
    return "\n\n\n".join(parts)


def called(subject: Subject) -> str:
    """How a user would call the subject: the functions that the recorder needs, those not given left as in
    eager.
    """
    texts = [subject.script.strip()]
    for name, parameters, result in FUNCTIONS:
        if f"def {name}(" not in subject.script:
            texts.append(f"def {name}({parameters}):\n    return {result}")
    return "\n\n\n".join(text for text in texts if text)


def _new(source: Source, imports: str) -> list[str]:
    """The program's import lines that the recorder does not have."""
    return sorted(set(source.imports.values()) - set(imports.splitlines()))


def runnable(program: Program) -> str:
    """The program as Python text with a function `run(p)`. Raises ReproError if it has no such form."""
    source, entry = _program(program)
    text = source.text()
    if entry != "run":
        text = re.sub(rf"\bdef {entry}\b", "def run", text)
    return "\n".join(sorted(set(source.imports.values()))) + "\n\n\n" + text


def _program(program: Program) -> tuple[Source, str]:
    """The source of the program, and what `PROGRAM` is."""
    if program.source is not None:
        return Source({}, {"": program.source.strip()}), "run"
    body = program.plain or program.body
    source = source_of_call(body) if isinstance(body, partial) else source_of(body)
    return source, list(source.definitions)[-1]


def _settings(program: Program, subject: Subject, device: torch.device) -> dict[str, object]:
    return {
        "SUBJECT": repr(subject.name),
        "SEED": program.case.seed,
        "BITWISE": subject.bitwise,
        "REFERENCE": program.fp64,
        "WIDEN": program.source is not None,
        "DEVICE": repr(device.type),
    }


def _heading(program: Program, subject: Subject, row: Row, name: str) -> str:
    told = f"{subject.name} differs from eager: {row.symptom}: {' '.join(row.reason.split())}"
    lines = [fill(told, 108)]
    if program.doc:
        lines.append(fill(f"What eager does: {program.doc}", 108))
    if row.where:
        lines.append(fill(f"{row.where[0].upper()}{row.where[1:]}.", 108))
    lines.append(f"Found with torch {torch.__version__}, seed {program.case.seed}.")
    lines += filter(None, [needed(subject.file)])
    lines.append(USAGE.format(name=name).strip("\n"))
    return "\n\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
