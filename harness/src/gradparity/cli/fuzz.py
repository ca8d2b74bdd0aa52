"""`gradparity fuzz`: programs drawn at random against one subject.

In: options. Out: each distinct divergence, shrunk, as JSON and as a script; a summary, a report, an exit
code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradparity import report
from gradparity.cli import completion, options
from gradparity.cli.outcome import Files
from gradparity.errors import ReproError, StoreFullError
from gradparity.executors.registry import Resources
from gradparity.finds import handed_over
from gradparity.fuzz import FuzzOptions, FuzzSummary
from gradparity.fuzz import fuzz as fuzzed
from gradparity.fuzzing.diary import Diary
from gradparity.fuzzing.find import Find, Folder
from gradparity.generate.policies import POLICIES
from gradparity.handover import write_script
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row

EVERY = 10.0
"""Seconds between two plain lines."""
MOST_MEMORY = 4.0
"""GiB that a worker may hold on the CPU, if nothing else is said. It holds less than one: no tensor of a
drawn program has more than 2 ** 13 elements.
"""
WITHOUT_FIND = ("timeout", "crash", "out-of-memory", "broken-case")
"""Symptoms of divergences that cannot be shrunk, because the process did not outlive them."""

Minutes = Annotated[float | None, typer.Option(min=0.01, help="end after so many minutes; default: 1")]
Cases = Annotated[int | None, typer.Option(min=1, help="end after so many cases")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help=f"how programs are drawn; repeatable: {', '.join(POLICIES)}",
        autocompletion=completion.policy,
    ),
]
FindsFolder = Annotated[
    Path, typer.Option("--finds", "-o", help="folder for finds; what is there already is no news")
]


def fuzz(  # noqa: PLR0913 - a command has as many parameters as options
    subject: options.Subject,
    minutes: Minutes = None,
    cases: Cases = None,
    seed: options.Seed = 0,
    finds: FindsFolder = Path("finds"),
    policy: Policies = None,
    processes: options.Processes = 2,
    timeout: options.Timeout = 60.0,
    shrink_seconds: Annotated[float, typer.Option(min=0.0, help="for one program; 0: no shrinking")] = 60.0,
    device: options.DeviceOption = options.Device.auto,
    report_file: options.HtmlFile = None,
    json_file: options.JsonFile = None,
    executor: options.ExecutorOption = "local",
    address: options.Address = None,
    gpus_per_worker: options.GpusPerWorker = 0.0,
    memory_limit: options.MemoryLimit = None,
) -> None:
    """Draws programs at random and compares the subject with eager; shrinks and keeps what is new.

    Ctrl-C ends it with what there is; the same command goes on where it was interrupted or killed. What
    stands in the folder of finds is counted, and not reported again.

    \b
    Examples:
      gradparity fuzz --subject compile:inductor --minutes 2 --report out.html
      gradparity fuzz -s compile:my_backend --cases 500 --seed 7 --policy views
    """
    console = options.console()
    with options.errors(console):
        named = options.device_name(device)
        limit = memory_limit or (MOST_MEMORY if named == "cpu" else None)
        wanted = FuzzOptions(
            subject=subject,
            seed=seed,
            minutes=minutes if minutes is not None or cases is not None else 1.0,
            cases=cases,
            policies=tuple(policy or ()),
            device=named,
            processes=processes,
            timeout=timeout,
            shrink_seconds=shrink_seconds,
            known=tuple(find.signature for find in Folder(finds).finds() if find.subject == subject),
            resources=Resources(
                executor, address, gpus_per_worker, None if limit is None else int(limit * 2**30)
            ),
        )
        diary = Diary(finds, campaign(wanted))
        wanted = continued(wanted, diary, console)
        kept = Kept(Folder(finds), console, diary, [*diary.done.rows])
        with watching(console, wanted) as view:
            summary = fuzzed(wanted, kept.take, partial(_heard, kept, view))
        if not summary.interrupted:
            diary.end()
        tell(console, summary)
        Files(json_file, report_file).write(kept.rows)
    answers = resolve(subject).accountable and bool(summary.new)
    raise typer.Exit(2 if summary.interrupted else (int(answers) if summary.cases else 5))


def campaign(wanted: FuzzOptions) -> dict[str, Any]:
    """What decides a campaign, in plain data."""
    names = ("subject", "seed", "minutes", "cases", "policies", "device", "timeout", "shrink_seconds")
    return {name: getattr(wanted, name) for name in names} | {"torch": torch.__version__}


def continued(wanted: FuzzOptions, diary: Diary, console: Console) -> FuzzOptions:
    """The rest of a campaign that was interrupted or killed."""
    done = diary.done
    known = tuple(each for each in wanted.known if each.digest not in done.pending)
    if not done.numbers:
        return replace(wanted, known=known)
    used = done.state["seconds"]
    console.print(f"goes on: {len(done.numbers)} cases are judged, {used:.0f} s used", markup=False)
    return replace(wanted, known=known, done=done)


def _heard(kept: Kept, view: View, summary: FuzzSummary, row: Row | None) -> None:
    kept.note(summary, row)
    view(summary)


@dataclass
class Kept:
    """What the campaign leaves: finds in the folder, rows for the report."""

    folder: Folder
    console: Console
    diary: Diary
    rows: list[Row]

    def note(self, summary: FuzzSummary, row: Row | None) -> None:
        """Keeps a row; of a divergence only what a find says, so that the report shows the shrunk one."""
        if row is None:
            return
        shown = None if row.is_find and row.symptom not in WITHOUT_FIND else row
        self.rows += [] if shown is None else [shown]
        if summary.number not in self.diary.done.numbers:
            self.diary.note(summary.number, summary.state(), shown)

    def take(self, find: Find) -> None:
        """Writes the find and its script, and tells. Raises StoreFullError, with the program shown."""
        self.rows.append(replace(find.row, case=find.address, signature=find.signature.digest))
        self.diary.find(self.rows[-1])
        try:
            path = self.folder.save(find)
        except OSError as error:
            self.console.print(find.shrunk.source, markup=False, highlight=False, soft_wrap=True)
            raise StoreFullError(
                f"cannot write the find above: {error}\n"
                "  try    free some space, and run the same command again: it finds it again"
            ) from error
        self.console.print(report.line(self.rows[-1]), soft_wrap=True)
        self.console.print(f"  {find.signature.describe()}\n  {path}", markup=False, soft_wrap=True)
        try:
            script = write_script(handed_over(find), self.folder.path, torch.device("cpu"))
            self.console.print(f"  {script}", markup=False, soft_wrap=True)
        except ReproError as error:
            self.console.print(f"  no script: {error}", markup=False, soft_wrap=True)


@contextmanager
def watching(console: Console, wanted: FuzzOptions) -> Iterator[View]:
    """The view that suits this console."""
    if not console.is_terminal:
        yield View(console)
        return
    columns = (
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    progress = Progress(*columns, console=console)
    with Live(progress, console=console, transient=True):
        yield View(console, progress, total=60 * wanted.minutes if wanted.minutes else wanted.cases)


class View:
    """Tells where a campaign stands: in a bar, or in a line now and then."""

    def __init__(
        self, console: Console, progress: Progress | None = None, total: float | None = None
    ) -> None:
        self._console, self._progress = console, progress
        self._task = progress.add_task("", total=total) if progress is not None else None
        self._next = time.monotonic() + EVERY

    def __call__(self, summary: FuzzSummary) -> None:
        if self._progress is not None and self._task is not None:
            by_time = self._progress.tasks[0].total
            done = summary.seconds if by_time and by_time > summary.cases else summary.cases
            self._progress.update(self._task, completed=done, description=describe(summary))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self._console.print(describe(summary), markup=False, highlight=False, soft_wrap=True)


def describe(summary: FuzzSummary) -> str:
    """One line."""
    counted = ", ".join(f"{count} {name}" for name, count in summary.verdicts.most_common())
    return (
        f"{summary.seconds:.0f} s, {summary.cases} cases ({summary.rate:.1f} a second, "
        f"{summary.rejected_share:.1%} of drawings rejected): {counted or 'none yet'}; "
        f"{summary.new} new, {summary.repeated} known divergences"
    )


def tell(console: Console, summary: FuzzSummary) -> None:
    """What there is to say in the end."""
    for text in summary.lost:
        console.print(f"lost: {text}", markup=False, soft_wrap=True)
    if summary.fired:
        fired = ", ".join(f"{name} {count}" for name, count in summary.fired.most_common(12))
        console.print(f"passes that fired, in so many programs: {fired}", markup=False, soft_wrap=True)
    console.print(
        describe(summary) + ("; interrupted" if summary.interrupted else ""), markup=False, soft_wrap=True
    )
