"""How many scenarios show what was wrong on commit 334be4c, by class, as data and as a table.

In: rows of ``gradparity run --json``, of scenarios with the sources of that commit, and with today's. Out:
the file `suites/parity/defects.json`, and a table.

    git worktree add ../before 334be4c
    export PYTHONPATH=../before/packages/retrograd/src:harness/src    # then again with today's sources
    python -m gradparity run --corpus scenarios --json before.jsonl --expected suites/parity/expected.toml \\
        --subject retrograd-live:eager --subject retrograd-aot:eager --subject retrograd-compile:eager
        # and `aot_poolings_of_images` under retrograd-aot:inductor, `aot_dropout_between*` under
        # compile:retrograd+random
    python suites/parity/defects.py before.jsonl now.jsonl    # writes the file; several of each: before+more
    python suites/parity/defects.py                           # prints the table
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DATA, CLASSES = FOLDER / "defects.json", FOLDER / "defects.toml"


def failures(files: str) -> dict[tuple[str, str], bool]:
    """Whether a scenario failed under a subject: it diverged, or fell back without being listed."""
    found = {}
    for path in files.split("+"):
        for row in map(json.loads, Path(path).read_text().splitlines()):
            key = (row["case"].rpartition("::")[2], row["subject"])
            found[key] = (row["verdict"] != "AGREE" and not row["set_aside"]) or bool(row["unlisted"])
    return found


def compared(before: Mapping[Any, bool], now: Mapping[Any, bool]) -> dict[str, list[str]]:
    """The subjects under which each scenario failed before and does not fail now."""
    mended: dict[str, list[str]] = {}
    for (case, subject), failed in sorted(before.items()):
        if failed and now.get((case, subject)) is False:
            mended.setdefault(case, []).append(subject)
    return mended


def classes() -> list[dict[str, Any]]:
    """The classes, as they were written down."""
    found: list[dict[str, Any]] = tomllib.loads(CLASSES.read_text())["class"]
    return found


def of_class(one: Mapping[str, Any], mended: Mapping[str, Any]) -> list[str]:
    """The scenarios of a class that were mended."""
    return [case for case in mended if any(fnmatchcase(case, glob) for glob in one["cases"])]


def table(mended: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The lines of the table."""
    yield "| where | class | scenarios that failed, and pass now |"
    yield "|---|---|---|"
    for one in classes():
        count = len(of_class(one, mended))
        yield f"| {one['part']} | {one['what']} | {count if one['cases'] else 'none: ' + one['instead']} |"
    runs = sum(map(len, mended.values()))
    yield f"| all | {len(classes())} classes | {len(mended)}, in {runs} pairs of scenario and subject |"


if __name__ == "__main__":
    if sys.argv[1:]:
        before, now = map(failures, sys.argv[1:])
        DATA.write_text(json.dumps(compared(before, now), indent=1, sort_keys=True) + "\n")
    sys.stdout.write("\n".join(table(json.loads(DATA.read_text()))) + "\n")
