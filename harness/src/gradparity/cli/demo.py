"""`gradparity demo`: real divergences of the torch that is installed, within a minute.

In: a folder. Out: timelines and tables on the console; a script for each divergence and report.html in the
folder.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gradparity import report, timeline
from gradparity.case import Case
from gradparity.cli import options
from gradparity.cli.issue import Folder
from gradparity.corpus import registry as corpora
from gradparity.corpus.demo import RUNS
from gradparity.differential import compare
from gradparity.exhibit import exhibit
from gradparity.finds import Judged
from gradparity.handover import write_script
from gradparity.html.page import write_page
from gradparity.signature import signature_of
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row
from gradparity.work import alarm, quiet, with_ablation

CPU = torch.device("cpu")


def demo(
    out: Folder = Path(),
    budget: Annotated[float, typer.Option(help="start nothing new after so many seconds")] = 60.0,
) -> None:
    """Shows where the installed torch differs from eager: hook order, wrong gradients, masks drawn twice.

    Writes repro_<signature>.py for each, which needs plain torch only, and report.html, which opens offline.

    \b
    Example:
      gradparity demo --out demo
    """
    console = options.console()
    until = time.monotonic() + budget
    torch.set_num_threads(1)
    quiet()
    rows: list[Row] = []
    with options.errors(console):
        console.print(f"torch {torch.__version__}, on the CPU\n")
        for name, subject in RUNS:
            if time.monotonic() > until:
                console.print(f"no time left for {name} under {subject}", markup=False)
                continue
            with alarm(120.0):
                rows.append(_shown(name, subject, out, console))
        page = out / "report.html"
        write_page(rows, page)
    finds = sum(row.is_find for row in rows)
    console.print(f"{finds} of {len(rows)} programs differ from eager; wrote {page}", markup=False)


def _shown(name: str, subject: str, out: Path, console: Console) -> Row:
    """Runs one program and prints what there is to see."""
    program = corpora.program(Case("demo", name), CPU)
    found = compare(program, resolve(subject), CPU)
    row = replace(found.row, exhibit=exhibit(found))
    console.print(f"[bold]{name}[/] under [bold]{subject}[/]: {program.doc}")
    if not row.is_find:
        console.print(f"  {row.verdict}: this torch does as eager does\n")
        return row
    row = with_ablation(replace(row, signature=signature_of(row).digest), program, CPU)
    for table in (timeline.timelines(found), timeline.error_table(found)):
        if table is not None:
            console.print(table)
    console.print(report.line(row), soft_wrap=True)
    script = write_script(Judged(program, resolve(subject), row), out, CPU)
    where = f"broken by {row.stage}{' at ' + row.operator if row.operator else ''}; " if row.stage else ""
    console.print(f"{where}{program.issue}\nwrote {script}\n", markup=False, highlight=False)
    return row
