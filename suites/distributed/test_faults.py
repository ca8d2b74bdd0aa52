"""Ranks that fail or compile alone: both ranks end as in eager, and none hangs.

Each rank compiles for itself, with Dynamo and the live path, and only the program's own collectives wait.
"""

from __future__ import annotations

import pytest

from distributed.faults import Fault, verdict

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("faults")]
"""In one worker, so that torch is imported once for all ranks."""


@pytest.mark.parametrize(
    ("fault", "program", "way"),
    [
        (Fault("raise", "hook", rank=1, step=1), "ddp", "live and backend"),
        (Fault("raise", "backward", rank=0, step=0), "hooks", "compile"),
        (Fault("kill", "backward", rank=0, step=1), "fsdp2", "live"),
        (Fault("sizes", "start", rank=1, step=2), "ddp", "backend"),
        (Fault("cold", "start", rank=0, step=2), "hooks", "live and backend"),
    ],
)
def test_both_ranks_end_as_in_eager(fault: Fault, program: str, way: str) -> None:
    assert verdict(fault, program, way) == "as eager"


def test_an_outcome_that_is_not_eagers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault("raise", "hook", rank=1, step=1)
    monkeypatch.setattr("distributed.faults.of_eager", lambda *_: [["done"], ["done"]])
    for found, told in (
        ([["done"]] * 2, "as eager"),
        ([["done"], ["other"]], "differs"),
        ([["done"], 1], "hung"),
    ):
        monkeypatch.setattr("distributed.faults.outcomes", lambda *_, found=found: found)
        assert verdict(fault, "hooks", "live") == told
