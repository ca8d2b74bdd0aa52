"""Hypothesis strategies: sound programs, which shrink, and steer towards passes that fire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings

from gradparity.case import Case
from gradparity.corpus.generated import scripted
from gradparity.differential import compare
from gradparity.errors import UnknownNameError
from gradparity.fired import counting
from gradparity.generate.draw import run_in_eager, why_rejected
from gradparity.generate.script import Script
from gradparity.generate.strategy import aim, programs
from gradparity.subjects.registry import resolve

CPU = torch.device("cpu")
QUIET = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.target],
)


@QUIET
@given(programs("views", "mutation", "hooks"))
def test_every_program_runs_in_eager(script: Script) -> None:
    assert script.policy in ("views", "mutation", "hooks")
    assert why_rejected(script, run_in_eager(script)) is None


def test_hypothesis_shrinks_what_it_finds() -> None:
    def interesting(script: Script) -> bool:
        return "program" in script.source

    small = settings(QUIET, max_examples=40, phases=[Phase.generate, Phase.shrink])
    found = find(programs("elementwise"), interesting, settings=small)
    assert len(found.source.splitlines()) < 22


def test_a_policy_that_does_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="unknown policy"):
        programs("nothing")


def test_passes_that_fire_are_what_it_aims_at() -> None:
    subject = resolve("stock-passes:inductor")
    seen: list[int] = []

    @settings(QUIET, max_examples=6)
    @given(programs("patterns"))
    def campaign(script: Script) -> None:
        with counting() as fired:
            compare(scripted(Case("generated", "patterns", 0), script), subject, CPU, confirm=False)
        aim(fired)
        seen.append(len(fired))

    campaign()
    assert max(seen) >= 2
