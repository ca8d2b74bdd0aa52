"""`gradparity shrink`: a diverging case made as small as it can be.

In: a case or a signature. Out: the smaller program as a script in plain
torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from gradparity import report
from gradparity.cli import options
from gradparity.cli.app import NOTHING_RAN
from gradparity.cli.issue import CASE, Folder
from gradparity.errors import ReproError
from gradparity.finds import handed_over, named, smaller
from gradparity.fuzzing.smaller import Effort
from gradparity.handover import write_script, write_short
from gradparity.verdict import Row
from gradparity.work import Task


def shrink(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[str, typer.Argument(help=CASE)],
    subject: options.OneSubject = None,
    store: Annotated[Path | None, typer.Option("--store", help="look a signature up here")] = None,
    out: Folder = Path(),
    seconds: Annotated[float, typer.Option(min=1.0, help="go on for at most so long")] = 60.0,
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 60.0,
    seed: options.Seed = 0,
    trust: options.Trust = False,
    check: options.Checks = None,
) -> None:
    """Cuts statements, operands, sizes and hooks as long as the case diverges alike; writes the script.

    A candidate that hangs or crashes costs itself only.

    \b
    Examples:
      gradparity shrink generated::views::7 -s compile:inductor
      gradparity shrink 1f2e3d4c --store results.db --seconds 120
    """
    console = options.console()
    with options.errors(console):
        where = options.device_name(device)
        found = named(case, subject, store, seed, trust)
        task = Task.of(found.case, found.subject, where, checks=found.checks(check))
        effort = Effort(where, timeout, seconds)
        tell = partial(console.print, markup=False, soft_wrap=True)
        made = smaller(task, effort, tell)
        if isinstance(made, Row):
            why = f": {made.reason}" if made.reason else ""
            console.print(f"{made.verdict}: nothing to shrink{why}", markup=False, soft_wrap=True)
            raise typer.Exit(NOTHING_RAN)
        find, done = made
        try:
            script = write_script(handed_over(find), out, torch.device(where))
            one = write_short(handed_over(find), out, tell)
            told = f"wrote {script}" + (f" and {one}" if one is not None else "")
        except ReproError as error:
            console.print(find.shrunk.source, markup=False, highlight=False, soft_wrap=True)
            told = f"no script: {error}"
    console.print(report.line(find.row), soft_wrap=True)
    lines = [len(script.source.splitlines()) for script in (find.script, find.shrunk)]
    tries = f"{lines[0]} lines became {lines[1]} in {find.tried} tries" + ("" if done else "; time was up")
    console.print(f"{tries}; {told}", markup=False)
