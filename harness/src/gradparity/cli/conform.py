"""`gradparity conform`: how far a backend keeps eager's contract, level by level.

In: a backend, or two files of earlier runs. Out: one page, a JSON file, a badge; an exit code.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradparity import campaign, expected
from gradparity.cli import completion, options
from gradparity.cli.app import NOTHING_RAN
from gradparity.cli.issue import Folder
from gradparity.cli.outcome import print_stale
from gradparity.cli.progress import watching
from gradparity.conform.badge import badge
from gradparity.conform.compare import Change, changed
from gradparity.conform.levels import LEVELS
from gradparity.conform.outcome import REMARKS, RESULTS, Conformance, Result, conformance, read
from gradparity.conform.run import conformed, minutes_for_all
from gradparity.conform.section import section
from gradparity.html.page import write_page
from gradparity.subjects.registry import full_name
from gradparity.writing import write_text

MOST_SHOWN = 16
"""So many kinds of failures are shown, or cases that changed: the rest stands in the file."""
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        help="a backend as you have it: registered, MODULE:FUNCTION or FILE.py:FUNCTION; or a subject",
        autocompletion=completion.subject,
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", help="run nothing: compare two files that earlier runs wrote"),
]


def conform(  # noqa: PLR0913 - a command has as many parameters as options
    backend: Backend = None,
    compare: Compare = None,
    out: Folder = Path(),
    minutes: Annotated[float, typer.Option(min=0.1, help="end after so many minutes")] = 10.0,
    processes: options.Processes = 2,
    timeout: options.Timeout = 120.0,
    expected_file: options.ExpectedFile = None,
    device: options.DeviceOption = options.Device.auto,
    seed: options.Seed = 0,
    report_file: options.HtmlFile = None,
    strict: options.Strict = False,
    only_stock_free: options.OnlyStockFree = False,
    check: options.Checks = None,
) -> None:
    """Judges a backend on a fixed choice of programs, from the values of operators to training loops.

    Writes conformance.json and conformance.svg. Exits with 1 if the backend fails anywhere, with 5 if nothing
    fails but a level has no case that could be judged; with --compare, with 1 if the second run fails a case,
    or no longer passes one, or reaches a lower level. What --check memory and --check slow find is a remark,
    and fails nothing.

    \b
    Examples:
      gradparity conform --backend inductor --out results
      gradparity conform -b my_backend.py:compile_graph --expected known.toml
      gradparity conform --compare before.json after.json
    """
    console = options.console()
    with options.errors(console):
        if compare is not None:
            change = print_change(console, read(compare[0]), read(compare[1]))
            raise typer.Exit(int(change.is_loss))
        if backend is None:
            raise typer.BadParameter("name a --backend, or two files to --compare")
        plan = campaign.Plan(
            subjects=(full_name(backend),),
            corpora=(),
            device=options.device_name(device),
            processes=processes,
            timeout=timeout,
            seed=seed,
            checks=tuple(check or ()),
            blame=options.blame(strict, only_stock_free),
        )
        known = expected.load(expected_file) if expected_file is not None else None
        with watching(console) as view:
            result = conformed(plan, minutes, known, lambda campaign, entry: view(campaign))
        found = conformance(plan, result)
        found.write(out / "conformance.json")
        write_text(out / "conformance.svg", badge(found))
        if report_file is not None:
            write_page(result.rows, report_file, first=section(found))
    print_conformance(console, found, minutes_for_all(result))
    for error in result.errors:
        console.print(f"could not run: {error}", style="red", markup=False, soft_wrap=True)
    print_stale(console, result)
    console.print(f"wrote {out / 'conformance.json'} and {out / 'conformance.svg'}", markup=False)
    raise typer.Exit(result.exit_code or (NOTHING_RAN if found.unjudged else 0))


def print_conformance(console: Console, found: Conformance, minutes: int | None) -> None:
    """One page: the levels, the kinds of failures, what to do next. `minutes`: what all cases would need."""
    told = ", ".join(f"{name} {text}" for name, text in found.versions.items())
    console.print(f"{found.backend} on {found.device}: {told}", markup=False)
    table = Table()
    table.add_column("level", justify="right")
    table.add_column("what must be as in eager")
    for name in RESULTS:
        table.add_column(name, justify="right")
    for number, level in enumerate(LEVELS):
        count = found.count(number)
        style = "red" if count["failed"] else "green" if count["passed"] else "dim"
        table.add_row(str(number), level.title, *(str(count[name] or "·") for name in RESULTS), style=style)
    console.print(table)
    failures = found.failures()
    for item, times in failures[:MOST_SHOWN]:
        console.print(described(item, times), markup=False, soft_wrap=True)
    if len(failures) > MOST_SHOWN:
        console.print(f"… and {len(failures) - MOST_SHOWN} more kinds of failures", markup=False)
    if failures:
        console.print(f"look closer: gradparity show {failures[0][0].case} -s {found.backend}", markup=False)
    remarks = Counter(item.verdict for item in found.results if item.verdict in REMARKS)
    for verdict, times in remarks.items():
        console.print(f"remark: {verdict} in {times} results that pass", markup=False)
    console.print(found.describe(), markup=False)
    if found.unjudged:
        told = ", ".join(map(str, found.unjudged))
        console.print(f"nothing can be said of levels {told}: no case of theirs was judged", markup=False)
    if found.is_complete:
        return
    enough = f"all cases need about {minutes} minutes: --minutes {minutes}"
    console.print(enough if minutes else "give it more time: --minutes", markup=False)


def print_change(console: Console, before: Conformance, after: Conformance) -> Change:
    """The cases that fail now and did not, those that are mended, the versions that differ."""
    change = changed(before, after)
    for name in sorted(before.versions.keys() | after.versions.keys()):
        old, new = before.versions.get(name, "none"), after.versions.get(name, "none")
        if old != new:
            console.print(f"{name}: {old} → {new}", markup=False)
    changes = (
        ("fails now", change.broken, "red"),
        ("no longer agrees", change.unlike, "red"),
        ("mended", change.mended, "green"),
    )
    for title, items, style in changes:
        console.print(f"{title}: {len(items)}", style=style)
        for item in items[:MOST_SHOWN]:
            console.print(f"  {item.case}  {item.symptom}".rstrip(), markup=False, soft_wrap=True)
    if change.only_before or change.only_after:
        told = f"only in the first run: {change.only_before} cases; only in the second: {change.only_after}"
        console.print(told, markup=False)
    reached = [
        ("" if found.is_complete else "incomplete, ") + (str(found.reached) if found.reached >= 0 else "none")
        for found in (before, after)
    ]
    console.print(f"level reached: {' → '.join(reached)}", markup=False)
    return change


def described(item: Result, count: int) -> str:
    """One kind of failure in one line."""
    times = f" (and {count - 1} more)" if count > 1 else ""
    return f"level {item.level}  {item.verdict:<11} {item.symptom}  {item.case}{times}"
