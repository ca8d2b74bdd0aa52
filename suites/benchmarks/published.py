"""The results that the documents quote, as a page of asv: `nox -s page` makes it in `.asv/html`.

In: tables of `results`, each measured on one machine in one run. Out: results files of asv, under the commit
that last changed the table. A ratio is a benchmark of its own, beside the time that it belongs to.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from asv.benchmarks import Benchmarks
from asv.commands.publish import Publish
from asv.config import Config
from asv.machine import Machine
from asv.results import Results
from asv.runner import BenchmarkResult
from asv.util import write_json

from .figures import Table
from .markdown import MADE

RESULTS = Path(__file__).with_name("results")
ROOT = RESULTS.parents[2]
QUOTING = ("README.md", "docs/comparison.md")
_TURNS = r"turns-([\w-]+):\w+"
#: by benchmark: the parts that have it, with the name of a model; the end of a figure's name; type and unit
KINDS = {
    "training.time_step": (_TURNS, " step", "time", "seconds"),
    "training.track_step_ratio": (_TURNS, " of stock", "track", "of stock's step"),
    "training.peakmem_step": (_TURNS, " allocated", "peakmemory", "bytes"),
    "compile_time.time_cold_start": (r"start-(\w+):cold", " step", "time", "seconds"),
    "compile_time.time_warm_start": (r"start-(?:noted-)?(\w+):warm", " step", "time", "seconds"),
}


@dataclass(frozen=True)
class Figure:
    """One number of a table."""

    benchmark: str
    model: str
    way: str
    value: float


def figures(table: Table) -> Iterator[Figure]:
    """The numbers of `table` that the page shows. Where ways took turns without a ratio to stock, it is made
    from their steps."""
    for part, measured in table.parts.items():
        found = dict(measured.figures)
        stock = found.get("stock step", found.get("stock-like-eager step"))
        if stock is not None:
            steps = {name.removesuffix(" step"): one for name, one in found.items() if name.endswith(" step")}
            found = {f"{way} of stock": one / stock for way, one in steps.items()} | found
        for benchmark, (parts, end, *_) in KINDS.items():
            model = re.fullmatch(parts, part)
            for name, value in found.items() if model else ():
                if name.endswith(end):
                    yield Figure(benchmark, model[1], name.removesuffix(end), value)


def quoted() -> list[Path]:
    """The tables from which tables of the documents are made."""
    text = "".join((ROOT / name).read_text() for name in QUOTING)
    return [RESULTS / name for name in dict.fromkeys(made["file"] for made in MADE.finditer(text)) if name]


def save(config: Any, files: list[Path]) -> None:
    """Write the tables in `files` into the results folder of `config`, asv's configuration."""
    tables = {file: Table.of_json(file.read_text()) for file in files}
    found = {file: list(figures(table)) for file, table in tables.items()}
    benchmarks = {name: _benchmark(name, [one for all_ in found.values() for one in all_]) for name in KINDS}
    Benchmarks(config, list(benchmarks.values())).save()
    for file, table in tables.items():
        commit, moment = _last_change(file)
        machine = table.machine
        about = {"machine": machine.name, "device": machine.device}
        write_json(Path(config.results_dir, machine.name, "machine.json"), about, Machine.api_version)
        needs = {"torch": machine.torch, "run": file.stem}
        results = Results(about, needs, commit, moment, machine.python, file.stem, {})
        for name, benchmark in benchmarks.items():
            values = {(one.model, one.way): one.value for one in found[file] if one.benchmark == name}
            if values:
                in_order = [values.get(pair) for pair in product(*benchmark["params"])]
                none = [None] * len(in_order)
                results.add_result(benchmark, BenchmarkResult(in_order, none, none, 0, "", None))
        results.save(config.results_dir)


def _benchmark(name: str, figures: list[Figure]) -> dict[str, Any]:
    own = [one for one in figures if one.benchmark == name]
    *_, kind, unit = KINDS[name]
    return {
        "name": name,
        "version": "1",
        "unit": unit,
        "type": kind,
        "param_names": ["model", "way"],
        "params": [sorted({one.model for one in own}), sorted({one.way for one in own}, key=_ours_first)],
        "code": f"from {RESULTS.parent.name}/results, by {Path(__file__).name}",
    }


def _ours_first(way: str) -> tuple[bool, str]:
    """asv draws the first way of a benchmark until the reader picks others."""
    return not way.startswith("retrograd"), way


def _last_change(file: Path) -> tuple[str, int]:
    """The commit of the main line that last changed `file`, and its time in milliseconds."""
    command = ["git", "log", "--first-parent", "-1", "--format=%H %ct", "--", str(file)]
    commit, seconds = subprocess.check_output(command, cwd=file.parent, text=True).split()
    return commit, int(seconds) * 1000


def publish(config: Any) -> Path:
    """Make the page in the folder that `config`, asv's configuration, names; returns the folder."""
    save(config, quoted())
    Publish.run(config)
    return Path(config.html_dir)


if __name__ == "__main__":
    print(publish(Config.load()))
