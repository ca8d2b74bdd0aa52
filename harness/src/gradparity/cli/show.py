"""`gradparity show`: one case, both hook timelines side by side, the table of errors.

In: a case or a signature. Out: tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gradparity import report, timeline
from gradparity.ablation.ablate import ablate as taken_apart
from gradparity.cli import options
from gradparity.corpus import registry as corpora
from gradparity.differential import Comparison, compare
from gradparity.finds import named
from gradparity.subjects import registry as subjects
from gradparity.work import alarm, quiet


def show(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[
        str, typer.Argument(help="CORPUS::NAME, CORPUS::NAME::INDEX, or with --store a signature")
    ],
    subject: options.OneSubject = None,
    store: Annotated[Path | None, typer.Option("--store", help="look a signature up here")] = None,
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 300.0,
    seed: options.Seed = 0,
    ablate: options.Ablate = False,
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
        where = torch.device(options.device_name(device))
        found = named(case, subject, store, seed)
        program = corpora.program(found.case, where)
        torch.set_num_threads(1)
        quiet()
        with alarm(timeout):
            compared = compare(program, subjects.resolve(found.subject), where)
            steps = taken_apart(program, found.subject, where) if ablate else None
        console.print(f"{compared.row.case}: {program.doc}", markup=False)
        for table in (timeline.timelines(compared), timeline.error_table(compared)):
            if table is not None:
                console.print(table)
    _print_rest(console, compared, found.subject)
    if steps is not None:
        for step in steps.steps:
            console.print(f"{step.stage:<28} {step.subject:<40} {step.verdict} {step.symptom}", markup=False)
        console.print(f"broken by: {steps.stage or 'nothing'} {steps.operator}", markup=False)


def _print_rest(console: Console, compared: Comparison, subject: str) -> None:
    if compared.evidence is not None:
        for name, outcome in (("eager", compared.evidence.eager), (subject, compared.evidence.subject)):
            if outcome.raised is not None:
                console.print(f"{name} raises {outcome.raised.type}: {outcome.raised.message}", markup=False)
    row = compared.row
    for note in row.notes:
        console.print(f"note: {note}", markup=False)
    console.print(report.line(row) if row.symptom else f"{row.verdict}", soft_wrap=True)
