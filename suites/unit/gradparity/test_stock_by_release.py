"""What stock torch gets wrong in some releases only is there in these, and gone in the others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus.registry import program
from gradparity.differential import compare
from gradparity.subjects.registry import resolve
from gradparity.versions import is_within

CPU = torch.device("cpu")
ENTRIES = tomllib.loads((Path(__file__).parents[2] / "parity" / "stock.toml").read_text())["stock"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['case']} {entry['torch']}")
def test_what_is_told_of_a_release_is_so(entry: dict[str, str]) -> None:
    corpus, _, name = entry["case"].partition("::")
    row = compare(program(Case(corpus, name), CPU), resolve(entry["subject"]), CPU).row
    assert (f"{row.verdict} {row.symptom}" == entry["found"]) is is_within(entry["torch"])
    assert entry["what"]
