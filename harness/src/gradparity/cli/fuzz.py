"""`gradparity fuzz`: programs drawn at random against one subject.

In: options. Out: each distinct divergence, shrunk, as JSON and as a script; a summary, a report, an exit
code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from gradparity import report
from gradparity.cli import completion, options
from gradparity.cli.outcome import Files
from gradparity.cli.progress import View, watching
from gradparity.errors import ReproError, StoreFullError
from gradparity.executors.registry import Resources
from gradparity.finds import handed_over
from gradparity.fuzz import Facts, FuzzOptions, FuzzSummary
from gradparity.fuzz import fuzz as fuzzed
from gradparity.fuzzing.find import Find, Folder
from gradparity.generate.policies import POLICIES
from gradparity.handover import write_script
from gradparity.reading import read_as, written_by_us
from gradparity.signature import signature_of
from gradparity.store.store import CaseDone, Entry, Progress, Store
from gradparity.subjects.registry import resolve
from gradparity.versions import versions

MOST_MEMORY = 4.0
"""GiB that a worker may hold on the CPU, if nothing else is said. It holds less than one: no tensor of a
drawn program has more than 2 ** 13 elements.
"""
MOST_OTHERS = 4
"""So many of the finds that look like one are named by what they call."""
PRELOAD = ("gradparity.fuzzing.work", "torch._dynamo", "functorch.compile")
"""What every worker needs, if it runs on the CPU."""
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
    strict: options.Strict = False,
    only_stock_free: options.OnlyStockFree = False,
    check: options.Checks = None,
) -> None:
    """Draws programs at random and compares the subject with eager; shrinks and keeps what is new.

    Ctrl-C ends it with what there is; the same command continues where it was interrupted or killed. What
    stands in the folder of finds is counted, and not reported again.

    \b
    Examples:
      gradparity fuzz --subject compile:inductor --minutes 2 --report out.html
      gradparity fuzz -s compile:my_backend --cases 500 --seed 7 --policy views
    """
    console = options.console()
    blame = options.blame(strict, only_stock_free)
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
                executor,
                address,
                gpus_per_worker,
                None if limit is None else int(limit * 2**30),
                PRELOAD if named == "cpu" else (),
            ),
            blame=blame,
            checks=tuple(check or ()),
        )
        ends = f"{wanted.minutes:g} minutes" if wanted.minutes is not None else f"{cases} cases"
        told = f"{subject}: programs of seed {seed} for {ends}, {processes} workers; finds go to {finds}"
        console.print(told, markup=False, soft_wrap=True)
        with started(finds, campaign(wanted)) as progress, watching(console) as view:
            kept = Kept(Folder(finds), console)
            kept.again(progress)
            summary = fuzzed(wanted, partial(_heard, kept, view), progress)
        tell(console, summary, progress.store.path)
        if summary.ending.broken:
            raise StoreFullError(summary.ending.broken)
        Files(json_file, report_file).write(summary.rows)
    answers = resolve(subject, blame).accountable and bool(summary.finds)
    raise typer.Exit(2 if summary.ending.interrupted else (int(answers) if summary.cases else 5))


def campaign(wanted: FuzzOptions) -> dict[str, Any]:
    """What decides a campaign, in plain data."""
    names = (
        "subject",
        "seed",
        "minutes",
        "cases",
        "policies",
        "device",
        "timeout",
        "shrink_seconds",
        "blame",
        "checks",
    )
    return {name: getattr(wanted, name) for name in names}


@contextmanager
def started(folder: Path, plan: dict[str, Any]) -> Iterator[Progress]:
    """The rest of a campaign that was interrupted or killed, or a new one."""
    text = json.dumps(plan, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    with Store(folder / f"campaign_{digest}.jsonl") as store:
        yield Progress.of(store, digest, plan, versions())


def _heard(kept: Kept, view: View, summary: FuzzSummary, entry: Entry | None) -> None:
    for number, find in summary.begun.items():
        kept.announce(number, find)
    if isinstance(entry, CaseDone) and entry.facts["find"] is not None:
        kept.take(summary.finds[-1])
    view(summary)


@dataclass
class Kept:
    """What the campaign leaves in the folder: finds and their scripts."""

    folder: Folder
    console: Console
    announced: set[int] = field(default_factory=set)

    def announce(self, number: int, find: Find) -> None:
        """Tells of a find while it is made smaller, which takes a while."""
        if number not in self.announced:
            self.announced.add(number)
            told = report.line(replace(find.row, case=find.address))
            self.console.print("found, being made smaller:", told, soft_wrap=True)

    def again(self, progress: Progress) -> None:
        """Tells that a campaign continues. Its last find may lack its files."""
        steps = [entry for entry in progress.entries() if isinstance(entry, CaseDone)]
        if not steps:
            return
        with written_by_us(f"a case in {progress.store.path}", "case of this campaign", "move it away"):
            facts = read_as(Facts, steps[-1].facts)
        told = f"continues: {len(steps)} cases are judged, {facts.seconds:.0f} s used"
        self.console.print(told, markup=False)
        if facts.find is not None:
            self.take(facts.find)

    def take(self, find: Find) -> None:
        """Writes the find and its script, and tells. Raises StoreFullError, with the program shown."""
        try:
            path = self.folder.save(find)
        except OSError as error:
            self.console.print(find.shrunk.source, markup=False, highlight=False, soft_wrap=True)
            raise StoreFullError(
                f"cannot write the find above: {error}\n"
                "  try    free some space, and run the same command again: it finds it again"
            ) from error
        found = handed_over(find)
        self.console.print(report.line(replace(found.row, case=find.address)), soft_wrap=True)
        self.console.print(f"  {find.signature.describe()}\n  {path}", markup=False, soft_wrap=True)
        try:
            script = write_script(found, self.folder.path, torch.device("cpu"))
            self.console.print(f"  {script}", markup=False, soft_wrap=True)
        except ReproError as error:
            self.console.print(f"  no script: {error}", markup=False, soft_wrap=True)


def kind_line(finds: list[Find], count: int) -> str:
    """How many cases diverge so, what the first find is, and what the programs of the others call."""
    first, *others = finds
    told = f"{count:>6} × {first.signature.describe()}  {first.address}  {first.name}"
    if not others:
        return told
    calls = ", ".join(" ".join(find.signature.operators) or "nothing" for find in others[:MOST_OTHERS])
    more = ", …" if len(others) > MOST_OTHERS else ""
    return f"{told}, and {counted(len(others), 'program')} like it: {calls}{more}"


def counted(number: int, noun: str) -> str:
    """ "1 kind", "2 kinds"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def tell(console: Console, summary: FuzzSummary, store: Path) -> None:
    """What there is to say in the end: a line for each kind of the subject's own divergences, then one line
    for all that are stock's.
    """
    kinds = summary.finds_by_kind()
    if kinds:
        console.print(f"{len(summary.finds)} new divergences of {counted(len(kinds), 'kind')}:", markup=False)
    for finds, count in kinds:
        console.print(kind_line(finds, count), markup=False, highlight=False, soft_wrap=True)
    if owned := [row for row in summary.rows if row.stocks_own]:
        alike = len({signature_of(row) for row in owned})
        stages = ", ".join(sorted({row.stage for row in owned}))
        told = f"stock's own: {len(owned)} cases, {alike} kinds, which {stages} shows as well"
        console.print(f"{told}; to list them: gradparity report {store}", markup=False, soft_wrap=True)
    for text in summary.lost:
        console.print(f"lost: {text}", markup=False, soft_wrap=True)
    if summary.fired:
        fired = ", ".join(f"{name} {count}" for name, count in summary.fired.most_common(12))
        console.print(f"passes that fired, in so many programs: {fired}", markup=False, soft_wrap=True)
    ended = "; interrupted" if summary.ending.interrupted else ""
    console.print(summary.describe() + ended, markup=False, soft_wrap=True)
