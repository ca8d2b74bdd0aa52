"""`gradparity demo`: real divergences of the torch that is installed, within a minute.

In: a folder. Out: timelines and tables on the console; a script for each divergence and report.html in the
folder.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gradparity import report
from gradparity.case import Case
from gradparity.cli import options
from gradparity.cli.issue import Folder
from gradparity.cli.show import print_shown
from gradparity.corpus.demo import RUNS
from gradparity.finds import apart, judged
from gradparity.handover import write_script
from gradparity.html.page import write_page
from gradparity.timeline import show_unit
from gradparity.verdict import Row
from gradparity.work import Task

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
    rows: list[Row] = []
    tasks = [Task.of(Case("demo", name), subject, CPU.type, ablate=True) for name, subject in RUNS]
    with options.errors(console), closing(apart(tasks, 120.0, show_unit)) as results:
        console.print(f"torch {torch.__version__}, on the CPU\n")
        for task in tasks:
            if time.monotonic() > until:
                console.print(f"no time left for {task.case} under {task.subject}", markup=False)
                continue
            console.print(f"[bold]{task.chunk}[/] under [bold]{task.subject}[/]")
            rows.append(_shown(task, print_shown(console, next(results)), out, console))
        page = out / "report.html"
        write_page(rows, page)
    finds = sum(row.is_find for row in rows)
    console.print(f"{finds} of {len(rows)} programs differ from eager; wrote {page}", markup=False)


def _shown(task: Task, row: Row, out: Path, console: Console) -> Row:
    """Says what the row means, and writes the script."""
    if not row.is_find:
        console.print(f"  {row.verdict}: this torch does as eager does\n")
        return row
    console.print(report.line(row), soft_wrap=True)
    found = judged(task, row)
    script = write_script(found, out, CPU)
    where = f"{row.where}; " if row.where else ""
    console.print(f"{where}{found.program.issue}\nwrote {script}\n", markup=False, highlight=False)
    return row
