"""`gradparity merge`, `report` and `replay`: what is done with stored results.

In: stores and files of rows. Out: one store; a report; the same cases judged again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gradparity.case import Case
from gradparity.cli import options
from gradparity.cli.outcome import Files, print_rows
from gradparity.finds import apart, recorded, refuse_imports
from gradparity.html.figures import distinct
from gradparity.reading import written_by_us
from gradparity.store.merge import is_store
from gradparity.store.merge import merge as merged
from gradparity.store.store import Run, Store
from gradparity.verdict import Row
from gradparity.work import Task

Sources = Annotated[list[Path], typer.Argument(help="stores, or files of rows that --json wrote")]


def merge(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", "-o", help="the store to write; it may exist")],
) -> None:
    """Adds stores and files of rows to one store. Nothing counts twice; shards become one run.

    \b
    Example:
      gradparity merge part1.db part2.db --out all.db
    """
    console = options.console()
    with options.errors(console):
        count = merged(sources, out)
    console.print(f"{out}: {count} rows", markup=False)


def report(
    source: Annotated[Path, typer.Argument(help="a store, or a file of rows that --json wrote")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the HTML file to write")] = None,
    junit_file: options.JunitFile = None,
    json_file: options.JsonFile = None,
) -> None:
    """Prints the table of the newest run, and writes the HTML report, with the trend over all runs.

    \b
    Example:
      gradparity report results.db --out report.html
    """
    console = options.console()
    with options.errors(console):
        history = runs_of(source)
        rows = history[-1][1] if history else recorded(source)
        with written_by_us(f"a row of {source}", "row of gradparity", "the file as gradparity wrote it"):
            print_rows(console, rows)
            Files(json_file, out, junit_file).write(rows, history)
    for path in (out, junit_file, json_file):
        if path is not None:
            console.print(f"wrote {path}", markup=False)


def runs_of(source: Path) -> list[tuple[Run, list[Row]]]:
    """The runs of a store with their rows; none of a file of rows."""
    if source.is_file() and not is_store(source):
        return []
    with Store(source, create=False) as store:
        return [(run, store.rows(run.id)) for run in store.runs()]


def replay(
    source: Annotated[Path, typer.Argument(help="a store, or a file of rows that --json wrote")],
    every: Annotated[bool, typer.Option("--all", help="every divergence, not one of each signature")] = False,
    device: options.DeviceOption = options.Device.auto,
    timeout: options.Timeout = 300.0,
    trust: options.Trust = False,
) -> None:
    """Runs the stored divergences again: 0 if all are as recorded, 1 if any has changed or gone.

    \b
    Example:
      gradparity replay results.db
    """
    console = options.console()
    counts: Counter[str] = Counter()
    with options.errors(console):
        rows = recorded(source)
        chosen = [row for row in rows if row.is_find] if every else [group[0] for group in distinct(rows)]
        refuse_imports(chosen, source, trust)
        where = options.device_name(device)
        tasks = [
            Task.of(Case.parse(row.case, row.seed), row.subject, where, checks=row.checks) for row in chosen
        ]
        for row, data in zip(chosen, apart(tasks, timeout), strict=True):
            now = Row.from_json(data)
            said = compared(row, now)
            counts[said] += 1
            console.print(f"{said:<10} {row.subject}  {row.case}  {now.verdict} {now.symptom}", markup=False)
    console.print(", ".join(f"{count} {said}" for said, count in counts.items()) or "no divergence stored")
    raise typer.Exit(5 if not counts else int(set(counts) != {"as before"}))


def compared(before: Row, now: Row) -> str:
    """ "as before", "changed" or "gone"."""
    if not now.is_find:
        return "gone"
    return "as before" if (now.verdict, now.symptom) == (before.verdict, before.symptom) else "changed"
