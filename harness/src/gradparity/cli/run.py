"""`gradparity run`: subjects over corpora.

In: options. Out: a table, the divergences, files, an exit code.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console

from gradparity import campaign, expected
from gradparity.case import EVERY
from gradparity.cli import options
from gradparity.cli.outcome import Files, print_campaign
from gradparity.cli.progress import watching
from gradparity.corpus import registry as corpora
from gradparity.executors.registry import Resources
from gradparity.expected import Known
from gradparity.shard import Shard
from gradparity.store.store import Progress, Run, Store
from gradparity.verdict import Row
from gradparity.versions import versions


def run(  # noqa: PLR0913 - a command has as many parameters as options
    subject: options.Subjects,
    corpus: options.Corpora = None,
    processes: options.Processes = 2,
    json_file: options.JsonFile = None,
    limit_per_corpus: options.Limit = None,
    match: options.MatchOption = None,
    timeout: options.Timeout = 60.0,
    expected_file: options.ExpectedFile = None,
    device: options.DeviceOption = options.Device.auto,
    seed: options.Seed = 0,
    store: options.StoreFile = None,
    shard: options.ShardOption = None,
    shuffle: options.Shuffle = None,
    report_file: options.HtmlFile = None,
    junit_file: options.JunitFile = None,
    fresh: options.Fresh = False,
    check: options.Checks = None,
    ablate: options.Ablate = False,
    strict: options.Strict = False,
    only_stock_free: options.OnlyStockFree = False,
    memory_limit: options.MemoryLimit = None,
    executor: options.ExecutorOption = "local",
    address: options.Address = None,
    gpus_per_worker: options.GpusPerWorker = 0.0,
) -> None:
    """Runs subjects over corpora, prints the table and the divergences, and exits as pytest would.

    It exits with 1 if a subject diverges, unless the stage of stock torch before it (aot_eager, for a
    backend) shows the same, or the file of --expected lists it. --strict fails what stock shows as well.

    With --store, results are kept as they come: the same command goes on where it was interrupted or killed.

    \b
    Examples:
      gradparity run -s compile:inductor -c scenarios --store results.db --report report.html
      gradparity run -s stock-ca:eager --match 'two_branches*' --ablate
      gradparity run -s compile:my_backend -c op_db --shard 2/8 --store part2.db
    """
    console = options.console()
    with options.errors(console):
        memory = None if memory_limit is None else int(memory_limit * 2**30)
        plan = campaign.Plan(
            subjects=tuple(dict.fromkeys(subject)),
            corpora=tuple(dict.fromkeys(corpus or corpora.USUAL)),
            device=options.device_name(device),
            processes=processes,
            timeout=timeout,
            match=tuple(match or EVERY),
            limit_per_corpus=limit_per_corpus,
            seed=seed,
            shard=Shard.parse(shard) if shard else None,
            shuffle=shuffle,
            fresh=fresh,
            checks=tuple(check or ()),
            ablate=ablate,
            blame=options.blame(strict, only_stock_free),
            resources=Resources(executor, address, gpus_per_worker, memory),
        )
        known = expected.load(expected_file) if expected_file is not None else None
        result, history = through(plan, known, store, console)
        if not result.rows:
            options.tell_unmatched(match, plan.corpora)
        print_campaign(console, plan, result)
        Files(json_file, report_file, junit_file).write(result.rows, history, result.errors)
    raise typer.Exit(result.exit_code)


def through(
    plan: campaign.Plan, known: Known | None, path: Path | None, console: Console
) -> tuple[campaign.Campaign, list[tuple[Run, list[Row]]]]:
    """Runs the plan, with a store if there is a path. Returns the campaign and all runs of the store."""
    with ExitStack() as stack:
        progress = None
        if path is not None:
            campaign.units(plan)  # what cannot be run at all is no run
            store = stack.enter_context(Store(path))
            progress = Progress.of(store, plan.campaign, plan.identity(), versions())
            if progress.continued:
                there = len(store.rows(progress.run.id))
                console.print(f"continues run {progress.run.id}: {there} cases are there", markup=False)
        with watching(console) as view:
            result = campaign.run(plan, known, lambda campaign, entry: view(campaign), progress)
        if progress is None or result.ending.broken:
            return result, []
        return result, [(run, progress.store.rows(run.id)) for run in progress.store.runs()]
