"""`gradparity issue` and `sweep`: a find as files to hand over.

In: a case or a signature. Out: a script in plain torch and a draft of an issue; nothing is filed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from gradparity import report
from gradparity.campaign import OUTSIDE
from gradparity.cli import options
from gradparity.cli.app import USAGE_ERROR
from gradparity.finds import apart, judged, named
from gradparity.handover import write_issue, write_script
from gradparity.sweep import DIFFERS, VERSIONS, default_folder
from gradparity.sweep import sweep as swept
from gradparity.verdict import Row
from gradparity.work import Task

Folder = Annotated[Path, typer.Option("--out", "-o", help="the folder to write into")]
Environments = Annotated[
    Path | None, typer.Option("--environments", help="where environments are kept; default: the user's cache")
]
Versions = Annotated[
    list[str] | None,
    typer.Option("--torch", help=f"a version of torch; repeatable; default: {', '.join(VERSIONS)}"),
]


def issue(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[str, typer.Argument(help="CORPUS::NAME[::INDEX], or with --store a signature")],
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
) -> None:
    """Writes a stand-alone script and a draft of an issue, with ablation, timelines, versions. Files nothing.

    \b
    Examples:
      gradparity issue scenarios::two_branches_tensor_hooks -s stock-ca:eager
      gradparity issue 1f2e3d4c --store results.db --sweep 2.12.0
    """
    console = options.console()
    with options.errors(console):
        where = torch.device(options.device_name(device))
        meant = named(case, subject, store, seed, trust)
        task = Task.of(meant.case, meant.subject, where.type, ablate=True)
        row = Row.from_json(next(apart([task], timeout)))
        if not (row.is_find or row.stocks_own):
            console.print(f"{row.verdict}: nothing to report", markup=False)
            raise typer.Exit(5)
        if row.symptom.endswith(OUTSIDE):
            console.print(f"{row.verdict}: {row.reason}; there is no program to write down", markup=False)
            raise typer.Exit(5)
        found = judged(task, row)
        script = write_script(found, out, where)
        folder = environments or default_folder()
        said = dict(
            swept(script, sweep_versions or [], folder, lambda text: console.print(text, markup=False))
        )
        draft = write_issue(found, out, script.read_text(encoding="utf-8"), said)
    console.print(report.line(found.row), soft_wrap=True)
    console.print(f"wrote {script} and {draft}; nothing was filed", markup=False)


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
        console.print(f"error: no script at {script}", style="red", markup=False)
        raise typer.Exit(USAGE_ERROR)
    folder = environments or default_folder()
    for version, said in swept(
        script, torch_versions or list(VERSIONS), folder, lambda text: console.print(text, markup=False)
    ):
        console.print(f"torch {version:<8} {said}", markup=False, soft_wrap=True)
        differs = differs or said.startswith(DIFFERS)
    raise typer.Exit(int(differs))
