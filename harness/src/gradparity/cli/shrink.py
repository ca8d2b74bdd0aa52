"""`gradparity shrink`: a diverging case made as small as it can be.

In: a case, a signature, or a script that gradparity wrote. Out: the smaller program as a script in plain
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from gradparity import report
from gradparity.cli import options
from gradparity.cli.issue import Folder
from gradparity.corpus import registry as corpora
from gradparity.corpus.generated import scripted
from gradparity.differential import compare
from gradparity.finds import Judged, named
from gradparity.handover import write_script
from gradparity.repro.script import runnable
from gradparity.shrink.question import still_diverges
from gradparity.shrink.read import from_source
from gradparity.shrink.shrinker import Shrinker
from gradparity.subjects.registry import resolve
from gradparity.work import alarm, judged, quiet


def shrink(  # noqa: PLR0913 - a command has as many parameters as options
    case: Annotated[str, typer.Argument(help="CORPUS::NAME[::INDEX], or with --store a signature")],
    subject: options.OneSubject = None,
    store: Annotated[Path | None, typer.Option("--store", help="look a signature up here")] = None,
    out: Folder = Path(),
    seconds: Annotated[float, typer.Option(min=1.0, help="go on for at most so long")] = 60.0,
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 60.0,
    seed: options.Seed = 0,
) -> None:
    """Cuts statements, operands, sizes and hooks as long as the case diverges alike; writes the script.

    \b
    Examples:
      gradparity shrink generated::views::7 -s compile:inductor
      gradparity shrink 1f2e3d4c --store results.db --seconds 120
    """
    console = options.console()
    with options.errors(console):
        where = torch.device(options.device_name(device))
        torch.set_num_threads(1)
        quiet()
        found = named(case, subject, store, seed)
        program, judge = corpora.program(found.case, where), resolve(found.subject)
        script = from_source(runnable(program)).model_copy(
            update={"fp64": program.fp64, "cold": program.cold}
        )
        with alarm(timeout):
            first = compare(scripted(found.case, script), judge, where)
        if not first.row.is_find:
            console.print(f"{first.row.verdict}: nothing to shrink", markup=False)
            raise typer.Exit(5)
        question = still_diverges(first, found.case, judge, where, timeout)
        made = Shrinker(question, seconds).shrink(script)
        smaller = scripted(found.case, made.script)
        row = judged(smaller, judge, where)
        path = write_script(Judged(smaller, judge, row), out, where)
    console.print(report.line(row), soft_wrap=True)
    lines = [len(text.source.splitlines()) for text in (script, made.script)]
    told = f"{lines[0]} lines became {lines[1]} in {made.tried} tries" + (
        "" if made.done else "; time was up"
    )
    console.print(f"{told}; wrote {path}", markup=False)
