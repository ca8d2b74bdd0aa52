"""Public ways to train on ranks: two that run, what counts as unexpected, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.trainers import KNOWN, LINES, TRAINERS, main, unexpected

pytestmark = pytest.mark.programs

RESULTS = Path(__file__).parent / "results" / "trainers_gloo_torch2.13.json"


@pytest.mark.filterwarnings("ignore")
def test_two_public_ways_train_as_in_eager() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trainers", "optimizer in the backward, as torchtune;accelerate"])
    assert ended.value.code == 0


def test_what_is_unexpected() -> None:
    fine, other = {"differs": [], "fallbacks": []}, {"differs": ["hooks"], "fallbacks": []}
    lines = {"hooks": 1, **dict.fromkeys(LINES, fine)}
    assert unexpected({"Fabric": lines}) == []
    assert unexpected({"Fabric": lines | {"hooks": 0}}) == ["Fabric: no hook ran"]
    assert len(unexpected({"Fabric": lines | {"model.compile": other}})) == 1
    known, line = min(KNOWN)
    assert unexpected({known: lines | {line: other}}) == []
    assert len(unexpected({known: lines})) == 1


def test_the_committed_results_are_all_as_stated() -> None:
    found = json.loads(RESULTS.read_text())["trainers"]
    assert set(found) == {name for name in TRAINERS if name != "TRL"}
    assert len(found) == 10
    assert unexpected(found) == []
