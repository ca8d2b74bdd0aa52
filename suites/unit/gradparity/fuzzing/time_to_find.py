"""How soon `gradparity fuzz` meets a planted fault of a vendor's backend.

In: names of faults. Out: for each, where it was met, after how many cases, and after how many seconds of the
clock and of the processors, as JSON. Another job on the machine changes the first kind of seconds only.

From `suites`: `python -m unit.gradparity.fuzzing.time_to_find --out FILE [NAME …]`. Faults that are not
named keep what FILE says of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from gradparity.case import Case
from gradparity.cli.fuzz import PRELOAD
from gradparity.corpus.registry import program
from gradparity.differential import compare
from gradparity.executors.registry import Resources
from gradparity.fuzz import FuzzOptions, FuzzSummary, fuzz
from gradparity.fuzzing.find import Find
from gradparity.store.store import Entry
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict
from unit.gradparity.fuzzing import held_out_faults, vendor_faults

HERE = Path(__file__).parent
CORES = 2
START = 12.0
"""Seconds of the processors until a worker of the command begins its first case: torch is imported twice."""
WITHIN = 60.0 * CORES - START
"""So many seconds of the processors has a campaign of a minute on two idle cores."""
PATIENCE = 15.0
"""Minutes after which a campaign ends on a machine that has no time for it."""
CPU = torch.device("cpu")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Met:
    """When a fault was met. `case`: the program's address, "" if none met it; `cases`: how many were judged
    before; `seconds`: of the clock; `processor_seconds`: of all processes of the campaign; `load`: the
    machine's average of the last minute, when the campaign began.
    """

    symptom: str
    case: str
    cases: int
    stocks_own: int
    seconds: float
    processor_seconds: float
    load: float


def time_to_find(fault: str) -> Met:
    """Runs a campaign until it meets the fault, or has used as much as a minute on two cores gives."""
    found: list[Find] = []
    began, before, load = time.monotonic(), processor_seconds(), os.getloadavg()[0]

    def listen(summary: FuzzSummary, entry: Entry | None) -> None:
        found.extend(find for find in (*summary.begun.values(), *summary.finds) if shows_it(find))
        if found or processor_seconds() - before > WITHIN:
            raise KeyboardInterrupt

    resources = Resources(preload=PRELOAD)
    options = FuzzOptions(place_of(fault), minutes=PATIENCE, processes=CORES, resources=resources)
    summary = fuzz(options, listen)
    used, took = processor_seconds() - before, time.monotonic() - began
    symptom, case = (found[0].row.symptom, found[0].address) if found else ("", "")
    own = sum(row.stocks_own for row in summary.rows)
    return Met(symptom, case, summary.cases, own, round(took, 1), round(used, 1), round(load, 1))


def shows_it(find: Find) -> bool:
    """Whether it is more than a refusal, and the backend without a fault does not show it."""
    return find.row.verdict is not Verdict.UNSUPPORTED and is_right(Case.parse(find.address, find.seed))


@cache
def is_right(case: Case) -> bool:
    """Whether the backend without a fault runs this program as eager does, or as stock."""
    return not compare(program(case, CPU), resolve(place_of("right")), CPU).row.is_find


def first_line() -> float:
    """Seconds of the clock until the command says something."""
    words = [sys.executable, "-m", "gradparity", "fuzz", "-s", place_of("right"), "--cases", "1"]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*words, "-o", folder], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        took = time.monotonic() - began
        process.communicate()
    return round(took, 1)


def place_of(fault: str) -> str:
    """The subject with this fault. "right" has none."""
    module = held_out_faults if fault in held_out_faults.FAULTS else vendor_faults
    return f"compile:{module.__file__}:{fault}"


def processor_seconds() -> float:
    """Of this process and of all that it started, those that ended included."""
    times, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
        times[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(times[pid] for pid in mine)


def main() -> None:
    """Measures, and writes after each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=[*vendor_faults.FAULTS, *held_out_faults.FAULTS])
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    held = json.loads(words.out.read_text()) if words.out.exists() else {"met": {}}
    held["first_line_seconds"] = first_line()
    for fault in words.faults:
        met = time_to_find(fault)
        held["met"][fault] = asdict(met)
        held |= {"torch": torch.__version__, "cores": CORES, "held_out": [*held_out_faults.FAULTS]}
        words.out.write_text(json.dumps(held, indent=1) + "\n")
        sys.stdout.write(f"{fault} {met}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
