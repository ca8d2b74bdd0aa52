"""The thirty threads: programs that repeat in eager, and what was recorded of stock torch still holds.

`suites/corpus/threads.json` says which of them go wrong, by release of torch and subject, as they were seen;
`record()` here writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus.registry import program
from gradparity.corpus.threads import THREADS
from gradparity.differential import compare
from gradparity.subjects.base import Blame
from gradparity.subjects.eager import Eager
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict

CPU = torch.device("cpu")
FILE = Path(__file__).parents[2] / "corpus" / "threads.json"
SUBJECTS = ("compile:aot_eager", "compile:inductor", "stock-ca:eager")
RELEASE = torch.__version__.partition("+")[0]


def recorded(subject: str) -> dict[str, str]:
    """The threads that go wrong under this subject with the installed torch, and how."""
    return json.loads(FILE.read_text())[RELEASE][subject]


def row(name: str, subject: str) -> Row:
    return compare(program(Case("threads", name), CPU), resolve(subject, Blame.strict), CPU).row


def found(subject: str) -> dict[str, str]:
    rows = {name: row(name, subject) for name in THREADS}
    return {
        name: f"{each.verdict} {each.symptom}" for name, each in rows.items() if each.verdict.is_divergence
    }


def record() -> None:
    """Runs all threads under all subjects and writes what this release shows; other releases stay."""
    records = json.loads(FILE.read_text()) | {RELEASE: {subject: found(subject) for subject in SUBJECTS}}
    FILE.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


def test_there_are_thirty_and_one_has_two_numbers() -> None:
    assert len(THREADS) == 31
    assert all(item.issue == f"pytorch#{name.removeprefix('t')}" for name, item in THREADS.items())
    assert all(item.doc.startswith("Eager") for item in THREADS.values())


@pytest.mark.parametrize("name", THREADS)
def test_eager_agrees_with_itself(name: str) -> None:
    assert compare(program(Case("threads", name), CPU), Eager("eager"), CPU).row.verdict is Verdict.AGREE


@pytest.mark.skipif(not FILE.read_text().count(f'"{RELEASE}"'), reason="nothing is recorded of this release")
def test_what_was_recorded_of_aot_eager_still_goes_wrong() -> None:
    subject = "compile:aot_eager"
    rows = {name: row(name, subject) for name in recorded(subject)}
    assert {name: f"{each.verdict} {each.symptom}" for name, each in rows.items()} == recorded(subject)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not FILE.read_text().count(f'"{RELEASE}"'), reason="nothing is recorded of this release")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_record_is_complete(subject: str) -> None:
    assert found(subject) == recorded(subject)
