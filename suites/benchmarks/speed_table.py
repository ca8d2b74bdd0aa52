"""Measure rows of the table of speed on this machine into one JSON file, or merge such files.

    python -m benchmarks.speed_table --device cuda --rows 'first12,steady12' --seconds 540 --out FILE
    python -m benchmarks.speed_table --merge A.json B.json --note "two runs" --out FILE

A row is a name of `--list`, a part of it is "ROW:NAME", and both may be patterns. The file is written anew
after each part, so that what was measured before the end of a run is never lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .figures import Machine, Measured, Table, merged
from .fresh import MeasurementError, measure, measure_cold_and_warm, starts_in_turns
from .real_models import MODELS, RealModel
from .speed_rows import PARTS, Part, chosen
from .trained_models import TRAINED, TrainedModel
from .turns import in_turns

#: what parts need, by name.
NEEDED: dict[str, RealModel | TrainedModel] = {
    **MODELS,
    **{f"train-{name}": model for name, model in TRAINED.items()},
}
#: measurements that start processes themselves.
IN_TURNS: dict[str, Callable[..., dict[str, float]]] = {
    "in_turns": in_turns,
    "starts_in_turns": starts_in_turns,
}
#: Less is not worth starting a part for.
SHORTEST = 10.0


@dataclass
class Run:
    """One run: its name (the file's), where it measures, for how long, how many long parts at once, and which
    ways take turns (none: all)."""

    name: str
    device: str
    seconds_left: float = 86_400.0
    jobs: int = 1
    ways: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds_left

    def measure(self, part: Part) -> Measured | str:
        """The part's figures, or why there are none."""
        left = self.end - time.monotonic()
        if part.needs and not NEEDED[part.needs].is_here:
            return f"not present: {NEEDED[part.needs].package} is not installed"
        if left < SHORTEST:
            return "the run's time was over"
        try:
            figures = _measured(part, self.device, left, self.ways)
        except MeasurementError as error:
            return str(error)
        return Measured(figures, part.unit, self.name, self.jobs if part.is_long else 1)


def _measured(part: Part, device: str, limit: float, ways: Sequence[str]) -> dict[str, float]:
    arguments = {**part.arguments}
    if ways and "ways" in arguments:
        arguments["ways"] = [way for way in arguments["ways"] if way in ways]
    if part.measurement != "host_time":
        arguments["device"] = device
    if part.measurement in IN_TURNS:
        return IN_TURNS[part.measurement](**arguments)
    if part.caches == "filled":
        return _flat(measure_cold_and_warm(part.measurement, limit=limit / 2, **arguments))
    figures: Any = measure(part.measurement, cold=part.caches == "none", limit=limit, **arguments)
    return figures if isinstance(figures, dict) else {arguments["subject"]: figures}


def _flat(found: dict[str, Any]) -> dict[str, float]:
    """The figures of two processes, those of one that has several by "cold NAME" and "warm NAME"."""
    flat: dict[str, float] = {}
    for when, figures in found.items():
        flat |= (
            {f"{when} {name}": value for name, value in figures.items()}
            if isinstance(figures, dict)
            else {when: figures}
        )
    return flat


def measure_parts(parts: Iterable[Part], run: Run, table: Table, out: Path | None = None) -> Table:
    """Measure one part after the other; those that are long at the end, `run.jobs` at a time."""
    parts = list(parts)
    long = [part for part in parts if part.is_long and run.jobs > 1]
    for part in parts:
        if part not in long:
            _note(table, part, run.measure(part), out)
    with ThreadPoolExecutor(run.jobs) as pool:
        waiting = {pool.submit(run.measure, part): part for part in long}
        for done in as_completed(waiting):
            _note(table, waiting[done], done.result(), out)
    return table


def _note(table: Table, part: Part, found: Measured | str, out: Path | None) -> None:
    table.missing.pop(part.id, None)
    if isinstance(found, str):
        table.missing[part.id] = found
    else:
        table.parts[part.id] = found
    shown = found.splitlines()[-1] if isinstance(found, str) else found.figures
    print(f"{part.id}: {shown}", file=sys.stderr, flush=True)
    if out is not None:
        out.write_text(table.to_json())


def main(arguments: list[str] | None = None) -> int:
    """Run the program; 1 if a part that was to be measured could not be."""
    parser = argparse.ArgumentParser(prog="benchmarks.speed_table", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=_device())
    parser.add_argument("--rows", default="*", help="names or patterns of rows or parts, with commas between")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="start nothing after that")
    parser.add_argument("--jobs", type=int, default=1, help="parts of stock's compile time at once")
    parser.add_argument("--ways", default="", help="of rows in turns: only these, with commas between")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing, merge these")
    parser.add_argument("--note", action="append", default=[], help="to stand in the file")
    parser.add_argument("--list", action="store_true", help="show the parts")
    parser.add_argument("--out", type=Path, help="the file; without it, the table goes to the terminal")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(f"{part.id:40} {' '.join(part.devices)}" for part in PARTS))
        return 0
    if given.merge:
        table = merged(given.merge)
    else:
        name, ways = given.out.stem if given.out else given.rows, [*filter(None, given.ways.split(","))]
        run = Run(name, given.device, given.seconds, given.jobs, ways)
        table = Table(Machine.here(given.device))
        measure_parts(chosen(given.device, given.rows.split(",")), run, table, given.out)
    table.notes += given.note
    if given.out is None:
        print(table.to_json())
    else:
        given.out.write_text(table.to_json())
    return int(any(not why.startswith("not present") for why in table.missing.values()))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
