"""`gradparity show`: one case, both hook timelines side by side, the table of errors.

In: a case or a signature. Out: tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradparity import report
from gradparity.ablation.ablate import Ablation
from gradparity.cli import options
from gradparity.cli.issue import CASE
from gradparity.finds import apart, named
from gradparity.timeline import show_unit
from gradparity.verdict import Row
from gradparity.work import Task


def show(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[str, typer.Argument(help=CASE)],
    subject: options.OneSubject = None,
    store: Annotated[Path | None, typer.Option("--store", help="look a signature up here")] = None,
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 300.0,
    seed: options.Seed = 0,
    trust: options.Trust = False,
    ablate: options.Ablate = False,
    check: options.Checks = None,
) -> None:
    """Runs one case here and prints both hook timelines side by side and the table of gradient errors.

    \b
    Examples:
      gradparity show scenarios::two_branches_tensor_hooks -s stock-ca:eager
      gradparity show op_db::linalg.pinv::3 -s compile:inductor --ablate
      gradparity show 1f2e3d4c --store results.db
    """
    console = options.console()
    with options.errors(console):
        found = named(case, subject, store, seed, trust)
        task = Task.of(found.case, found.subject, options.device_name(device), ablate, found.checks(check))
        data = next(apart([task], timeout, show_unit))
    row = print_shown(console, data)
    for note in row.notes:
        console.print(f"note: {note}", markup=False)
    console.print(report.line(row) if row.symptom else f"{row.verdict}", soft_wrap=True)
    if ablate:
        steps = Ablation.from_json(row.exhibit.get("ablation", {}))
        console.print("ablation: each stage in a run of its own, after the run above", markup=False)
        for step in steps.steps:
            console.print(f"{step.stage:<28} {step.subject:<40} {step.verdict} {step.symptom}", markup=False)
        console.print(steps.describe(), markup=False)


def print_shown(console: Console, data: dict[str, Any]) -> Row:
    """Prints what `show_unit` gave; returns the row."""
    row = Row.from_json(data)
    console.print(f"{row.case}: {data.get('doc', '')}", markup=False)
    for table in data.get("tables", []):
        if table is not None:
            console.print(table)
    for text in data.get("raised", []):
        console.print(text, markup=False)
    return row
