"""`gradparity issue` and `sweep`: a find as files to hand over.

In: a case or a signature. Out: a script in plain torch and a draft of an issue; nothing is filed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradparity import report
from gradparity.campaign import OUTSIDE
from gradparity.case import Case
from gradparity.cli import options
from gradparity.cli.app import NOTHING_RAN, USAGE_ERROR
from gradparity.corpus.folder import PREFIX
from gradparity.errors import CaseError
from gradparity.finds import Judged, apart, handed_over, judged, named, smaller
from gradparity.fuzzing.find import Folder as Finds
from gradparity.fuzzing.smaller import Effort
from gradparity.handover import write_issue, write_script, write_short
from gradparity.sweep import DIFFERS, VERSIONS, at_hand, default_folder, said
from gradparity.sweep import sweep as swept
from gradparity.verdict import Row
from gradparity.work import Task

CASE = "CORPUS::NAME[::INDEX], the file of a find, or with --store a signature"
Folder = Annotated[Path, typer.Option("--out", "-o", help="the folder to write into")]
Environments = Annotated[
    Path | None, typer.Option("--environments", help="where environments are kept; default: the user's cache")
]
Versions = Annotated[
    list[str] | None,
    typer.Option("--torch", help=f"a version of torch; repeatable; default: {', '.join(VERSIONS)}"),
]


def issue(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[str, typer.Argument(help=CASE)],
    subject: options.OneSubject = None,
    store: Annotated[Path | None, typer.Option("--store", help="look a signature up here")] = None,
    out: Folder = Path(),
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 300.0,
    seed: options.Seed = 0,
    trust: options.Trust = False,
    sweep_versions: Annotated[
        list[str] | None, typer.Option("--sweep", help="also try this version of torch; repeatable")
    ] = None,
    environments: Environments = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="shrink the program for so long; 0: as it is")
    ] = 60.0,
    check: options.Checks = None,
) -> None:
    """Shrinks a case and writes a script and a draft of an issue, with ablation and versions. Files nothing.

    Versions of torch whose environment is there are tried; --sweep makes others.

    \b
    Examples:
      gradparity issue scenarios::two_branches_tensor_hooks -s stock-ca:eager
      gradparity issue 1f2e3d4c --store results.db --sweep 2.12.0
      gradparity issue finds/compile_inductor_1f2e3d4c.json
    """
    console = options.console()
    with options.errors(console):
        where = torch.device(options.device_name(device))
        meant = named(case, subject, store, seed, trust)
        task = Task.of(meant.case, meant.subject, where.type, True, meant.checks(check))
        tell = partial(console.print, markup=False, soft_wrap=True)
        made = shrunk(task, Effort(where.type, timeout, seconds), tell) if seconds else None
        found = made or as_it_is(task, timeout)
        row = found.row
        if not (row.is_find or row.stocks_own):
            tell(f"{row.verdict}: nothing to report")
            raise typer.Exit(NOTHING_RAN)
        if row.symptom.endswith(OUTSIDE):
            tell(f"{row.verdict}: {row.reason}; there is no program to write down")
            raise typer.Exit(NOTHING_RAN)
        script, one = write_script(found, out, where), write_short(found, out, tell)
        folder, asked = environments or default_folder(), list(sweep_versions or [])
        told = said(Path(sys.executable), one or script)
        if not told.startswith(DIFFERS):
            tell(f"{script} does not show the difference: {told}")
        here = {f"{torch.__version__} (here)": told}
        tried = swept(one or script, [*asked, *(set(at_hand(folder)) - set(asked))], folder, tell)
        draft = write_issue(found, out, here | dict(tried))
    console.print(report.line(row), soft_wrap=True)
    files = ", ".join(str(path) for path in (script, one, draft) if path is not None)
    console.print(f"wrote {files}; nothing was filed", markup=False)


def shrunk(task: Task, effort: Effort, tell: Callable[[str], None]) -> Judged | None:
    """The case made smaller, with the ablation of the smaller program; None if it has no text to cut."""
    try:
        made = smaller(task, effort, tell)
    except CaseError as error:
        tell(f"not shrunk: {error}")
        return None
    if isinstance(made, Row):
        return None
    find = made[0]
    with tempfile.TemporaryDirectory() as folder:
        Finds(Path(folder)).save(find)
        case = Case(f"{PREFIX}{folder}", find.name, None, find.seed)
        again = Task.of(case, task.subject, task.device, True, task.checks)
        row = Row.from_json(next(apart([again], effort.timeout)))
    found = handed_over(find)
    return replace(found, row=replace(row, case=task.case, corpus=task.corpus, signature=found.row.signature))


def as_it_is(task: Task, timeout: float) -> Judged:
    """The case, run and ablated."""
    return judged(task, Row.from_json(next(apart([task], timeout))))


def sweep(
    script: Annotated[Path, typer.Argument(help="a script that gradparity wrote")],
    torch_versions: Versions = None,
    environments: Environments = None,
) -> None:
    """Runs a script under several versions of torch, each in an environment that is kept. 1 if any differs.

    Versions other than the pinned one may load several GB each.

    \b
    Example:
      gradparity sweep repro_1f2e3d4c.py --torch 2.13.0 --torch 2.15.0
    """
    console = options.console()
    differs = False
    if not script.is_file():
        options.standard_error(console).print(f"error: no script at {script}", style="red", markup=False)
        raise typer.Exit(USAGE_ERROR)
    folder = environments or default_folder()
    for version, told in swept(
        script, torch_versions or list(VERSIONS), folder, lambda text: console.print(text, markup=False)
    ):
        console.print(f"torch {version:<8} {told}", markup=False, soft_wrap=True)
        differs = differs or told.startswith(DIFFERS)
    raise typer.Exit(int(differs))
