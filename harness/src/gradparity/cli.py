"""The command line: run, show, list.

In: arguments. Out: tables and lines on stdout, rows as JSONL, an exit code as pytest's (0 fine, 1 unexpected
divergence, unlisted fallback or stale entry, 2 interrupted, 4 usage error, 5 nothing ran).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from gradparity import campaign, expected, report, timeline
from gradparity.case import Case, Match
from gradparity.corpus import coverage
from gradparity.corpus import registry as corpora
from gradparity.corpus.scenario import registered
from gradparity.differential import compare
from gradparity.errors import GradparityError, UnknownNameError
from gradparity.subjects import registry as subjects
from gradparity.verdict import Row
from gradparity.work import alarm, quiet

USAGE_ERROR = 4
PIPE_WIDTH = 140


class Group(TyperGroup):
    """Commands whose usage errors exit with pytest's code for them, not with click's 2 (which means
    interrupted here).
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the program's own arguments."""
        with _usage_code():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parses and runs a command."""
        with _usage_code():
            return super().invoke(ctx)


class Device(StrEnum):
    """Where programs run; auto is a GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Subjects = Annotated[list[str], typer.Option("--subject", "-s", help="a subject's name; repeatable")]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--corpus", "-c", help="a corpus's name; repeatable; default: all float32"),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="where programs run")]
Timeout = Annotated[float, typer.Option(min=0.1, help="seconds for one case")]
Seed = Annotated[int, typer.Option(min=0, help="decides all inputs")]
Processes = Annotated[int, typer.Option("-n", "--processes", min=0, help="worker processes; 0: none")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write one JSON line per case")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="at most so many cases, spread evenly over the corpus")
]
MatchOption = Annotated[
    str, typer.Option(help="only cases that match: NAME, CORPUS::NAME or CORPUS::NAME::INDEX")
]
ExpectedFile = Annotated[
    Path | None, typer.Option("--expected", help="TOML file of known divergences and fallbacks")
]


@app.callback()
def main() -> None:
    """Tests the backward of PyTorch against eager: gradients, metadata, hook order, exceptions."""


@app.command()
def run(  # noqa: PLR0913 - a command has as many parameters as options
    subject: Subjects,
    corpus: Corpora = None,
    processes: Processes = 2,
    json_file: JsonFile = None,
    limit_per_corpus: Limit = None,
    match: MatchOption = "*",
    timeout: Timeout = 60.0,
    expected_file: ExpectedFile = None,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
) -> None:
    """Runs subjects over corpora, prints the table and the divergences, and exits as pytest would."""
    console = _console()
    with _errors(console):
        plan = campaign.Plan(
            subjects=tuple(dict.fromkeys(subject)),
            corpora=tuple(dict.fromkeys(corpus or corpora.USUAL)),
            device=_device(device),
            processes=processes,
            timeout=timeout,
            match=match,
            limit_per_corpus=limit_per_corpus,
            seed=seed,
        )
        known = expected.load(expected_file) if expected_file is not None else None
        with _progress(console) as bar:
            result = campaign.run(plan, known, bar)
    if json_file is not None:
        report.write_jsonl(result.rows, json_file)
    _print(console, plan, result)
    raise typer.Exit(result.exit_code)


@app.command()
def show(
    case: Annotated[str, typer.Argument(help="CORPUS::NAME or CORPUS::NAME::INDEX, as the report prints it")],
    subject: Annotated[str, typer.Option("--subject", "-s", help="a subject's name")],
    device: DeviceOption = Device.auto,
    timeout: Timeout = 300.0,
    seed: Seed = 0,
) -> None:
    """Runs one case here and prints both hook timelines side by side and the table of gradient errors."""
    console = _console()
    with _errors(console):
        where = torch.device(_device(device))
        program = corpora.program(Case.parse(case, seed), where)
        torch.set_num_threads(1)
        quiet()
        with alarm(timeout):
            found = compare(program, subjects.resolve(subject), where)
        console.print(f"{found.row.case}: {program.doc}", markup=False)
        for table in (timeline.timelines(found), timeline.error_table(found)):
            if table is not None:
                console.print(table)
    if found.evidence is not None:
        for name, outcome in (("eager", found.evidence.eager), (subject, found.evidence.subject)):
            if outcome.raised is not None:
                console.print(f"{name} raises {outcome.raised.type}: {outcome.raised.message}", markup=False)
    for note in found.row.notes:
        console.print(f"note: {note}", markup=False)
    console.print(report.line(found.row) if found.row.symptom else f"{found.row.verdict}", soft_wrap=True)


@app.command("list")
def list_(
    corpus: Corpora = None,
    subjects_only: Annotated[bool, typer.Option("--subjects", help="list subjects instead of cases")] = False,
    samples: Annotated[
        bool, typer.Option(help="list every sample of sampled corpora, not only the names")
    ] = False,
    areas: Annotated[
        bool, typer.Option("--areas", help="count the scenarios that show each part of a live backward")
    ] = False,
    match: MatchOption = "*",
) -> None:
    """Lists cases, one address per line (for sampled corpora the part before the index), or subjects."""
    console = _console()
    with _errors(console):
        if areas:
            for area, names in coverage.by_area(registered()).items():
                typer.echo(f"{len(names):>5}  {area}")
            return
        if subjects_only:
            for line in [*subjects.NAMED, *(f"{form:<24} {text}" for form, text in subjects.FORMS.items())]:
                typer.echo(line)
            return
        for name in corpus or corpora.NAMED:
            for address in _addresses(name, Match(match), samples):
                typer.echo(address)


def _addresses(name: str, match: Match, samples: bool) -> Iterator[str]:
    found = corpora.corpus(name)
    for chunk in found.chunks():
        if not match.takes_chunk(name, chunk):
            continue
        if not samples:
            yield Case(name, chunk).address
            continue
        for program in found.programs(chunk, torch.device("cpu"), 0):
            if match.takes(program.case):
                yield program.case.address


def _console() -> Console:
    """As wide as the terminal; wide enough for the tables where output goes to a file or pipe."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


class _Bar:
    """A progress bar that listens to a campaign."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=None)
        self._cases = self._divergences = 0

    def units(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def unit_done(self) -> None:
        self._progress.advance(self._task)

    def row(self, row: Row) -> None:
        self._cases += 1
        self._divergences += row.verdict.is_divergence and not row.set_aside
        text = f"{self._cases} cases, {self._divergences} divergences; {row.subject} {row.corpus}"
        self._progress.update(self._task, description=text)


@contextmanager
def _progress(console: Console) -> Iterator[_Bar]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress)


def _print(console: Console, plan: campaign.Plan, result: campaign.Campaign) -> None:
    console.print(
        f"torch {torch.__version__}, device {plan.device}, seed {plan.seed}, {plan.processes} processes"
    )
    if result.rows:
        console.print(report.table(result.rows))
    for line in report.lines(result.rows):
        console.print(line, soft_wrap=True)
    for text in report.fallback_lines(result.rows):
        console.print(text, markup=False, soft_wrap=True)
    for text in report.unlisted_lines(result.rows):
        console.print(text, style="red", markup=False, soft_wrap=True)
    for error in result.errors:
        console.print(f"could not run: {error}", style="red", markup=False, soft_wrap=True)
    for entry in result.stale:
        console.print(
            f"stale entry, nothing is so any more: {entry.describe()}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
    console.print(_summary(result), markup=False, soft_wrap=True)


def _summary(result: campaign.Campaign) -> str:
    aside = sum(row.set_aside for row in result.rows)
    diverged = sum(row.verdict.is_divergence and not row.set_aside for row in result.rows)
    text = f"{len(result.rows)} cases run, {aside} set aside, {diverged} divergences"
    text += f", of which {len(result.unexpected)} unexpected of an accountable subject"
    if result.unlisted:
        text += f"; {len(result.unlisted)} cases with unlisted fallbacks"
    if own := sum(row.stocks_own for row in result.rows):
        text += f", {own} of stock's own forward"
    if result.stale:
        text += f"; {len(result.stale)} stale expected entries"
    return text + ("; interrupted" if result.interrupted else "")


def _device(device: Device) -> str:
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise UnknownNameError("device", "cuda", ["cpu"])
    return device.value


@contextmanager
def _errors(console: Console) -> Iterator[None]:
    try:
        yield
    except GradparityError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE_ERROR) from error


@contextmanager
def _usage_code() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__name__ in ("UsageError", "NoArgsIsHelpError") or _is_usage_error(error):
            error.exit_code = USAGE_ERROR  # type: ignore[attr-defined]
        raise


def _is_usage_error(error: Exception) -> bool:
    return any(base.__name__ == "UsageError" for base in type(error).__mro__)
