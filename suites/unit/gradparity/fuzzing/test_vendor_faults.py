"""Faults of a vendor's backend: generation meets each of them within a minute on two cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus.registry import program
from gradparity.differential import compare
from gradparity.fuzz import FuzzOptions, fuzz
from gradparity.subjects.registry import resolve
from unit.gradparity.fuzzing.held_out_faults import FAULTS as HELD_OUT
from unit.gradparity.fuzzing.time_to_find import WITHIN, place_of, time_to_find
from unit.gradparity.fuzzing.vendor_faults import FAULTS

CPU = torch.device("cpu")
MEASURED = json.loads((Path(__file__).parents[3] / "parity" / "time_to_find.json").read_text())


def test_there_are_twenty_five_and_eight_more() -> None:
    assert (len(FAULTS), len(HELD_OUT)) == (25, 8)
    assert not FAULTS.keys() & HELD_OUT.keys()


@pytest.mark.parametrize("policy", ["elementwise", "views", "steps_inputs"])
def test_the_backend_without_a_fault_is_as_eager_or_as_stock(policy: str) -> None:
    row = compare(program(Case("generated", policy, 1), CPU), resolve(place_of("right")), CPU).row
    assert not row.is_find, row.reason


def test_a_fault_is_of_the_backend_and_not_of_stock() -> None:
    for number in range(8):
        case = Case("generated", "elementwise", number)
        row = compare(program(case, CPU), resolve(place_of("gradients_too_large")), CPU).row
        if row.symptom == "grad-values":
            assert (row.is_find, row.stage.endswith("gradients_too_large")) == (True, True)
            return
    pytest.fail("no program shows it")


def test_what_was_measured_is_of_these_faults_and_within_a_minute() -> None:
    assert MEASURED["met"].keys() == FAULTS.keys() | HELD_OUT.keys()
    assert MEASURED["held_out"] == [*HELD_OUT]
    assert MEASURED["first_line_seconds"] <= 5
    for name in FAULTS:
        assert MEASURED["met"][name]["case"], name
        assert MEASURED["met"][name]["processor_seconds"] <= WITHIN, name


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", FAULTS)
def test_a_minute_meets_every_fault(name: str) -> None:
    met = time_to_find(name)
    assert met.case
    assert met.processor_seconds <= WITHIN


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_minute_finds_nothing_where_there_is_no_fault() -> None:
    summary = fuzz(FuzzOptions(place_of("right"), cases=150, processes=2), lambda state, entry: None)
    assert [find.address for find in summary.finds] == []
    assert sum(row.stocks_own for row in summary.rows) > 0
