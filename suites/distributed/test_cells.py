"""The forty ways to train on ranks: two that run, what counts as a difference, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.cells import main, unexpected
from distributed.outcomes import Outcome, difference

pytestmark = pytest.mark.programs

RESULTS = Path(__file__).parent / "results"


@pytest.mark.filterwarnings("ignore")
def test_sharded_and_pipelined_training_equals_eager() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--wrappers", "FSDP2,zero bubble", "--modes", "accumulation"])
    assert ended.value.code == 0


@pytest.mark.parametrize("part", ["values", "hooks", "collectives", "parameters"])
def test_a_difference_in_any_part_is_seen(part: str) -> None:
    eager, ours = Outcome(), Outcome()
    getattr(eager, part).extend("ab")
    getattr(ours, part).extend("ac")
    assert difference(eager, eager) == ""
    assert difference(eager, ours) == f"{part}: 2 for 2; number 1: ['c'] for ['b']"
    getattr(ours, part)[:] = "a"
    assert difference(eager, ours) == f"{part}: 1 for 2; number 1: [] for ['b']"


def test_a_fallback_is_unexpected() -> None:
    fine = {"differs": [], "fallbacks": []}
    fell_back = {"differs": [], "fallbacks": ["capture-failed"]}
    assert unexpected({"DDP, plain": {"live": fine}}) == []
    assert len(unexpected({"DDP, plain": {"live": fine}, "TP, plain": {"live": fell_back}})) == 1


@pytest.mark.parametrize(("file", "count"), [("gloo_torch2.13", 40), ("nccl_h200x2_torch2.11", 25)])
def test_the_committed_results_are_all_as_stated(file: str, count: int) -> None:
    found = json.loads((RESULTS / f"cells_{file}.json").read_text())["cells"]
    assert len(found) == count
    assert unexpected(found) == []
