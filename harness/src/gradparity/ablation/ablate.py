"""ablate: a divergence under a subject, taken apart.

In: a program, the subject's name, a device. Out: an Ablation: the verdict of every rung of the subject's
ladder, the stage that breaks the case, and the operator or pass, where it can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradparity.ablation.inductor import bisected
from gradparity.ablation.ladders import Rung, ladder
from gradparity.ablation.operators import parting
from gradparity.corpus.base import Program
from gradparity.differential import Comparison, compare
from gradparity.errors import GradparityError
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict

INTERPRETED = (
    "dynamo",
    "aot_eager",
    "aot_eager_decomp_partition",
    "capture",
    "capture and order",
    "lowering",
)
"""Stages after which a graph still runs call by call, so that eager's calls can be missed in it."""

VALUES = ("grad-values", "values", "state-values", "hook-payload")
"""Symptoms for which there is an operator to be found."""


@dataclass(frozen=True)
class Step:
    """The verdict of one rung."""

    stage: str
    subject: str
    verdict: str
    symptom: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Ablation:
    """What each rung says; the stage that breaks the case ("" if none does any more); the operator, and how
    it was found.
    """

    steps: tuple[Step, ...] = ()
    stage: str = ""
    operator: str = ""
    how: str = ""

    def describe(self) -> str:
        """The last line: the stage and the operator, or why none is named."""
        if self.operator or not self.stage:
            return f"broken by: {self.stage or 'nothing'} {self.operator}".rstrip()
        why = "its calls cannot be seen one by one, or no value differs"
        return f"broken by: {self.stage}; no operator can be named: {why}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self) | {"steps": [asdict(step) for step in self.steps]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ablation:
        """Builds an ablation from plain data."""
        steps = tuple(Step(**step) for step in data.get("steps", ()))
        return cls(steps, data.get("stage", ""), data.get("operator", ""), data.get("how", ""))


def ablate(
    program: Program,
    subject: str,
    device: torch.device,
    deep: bool = True,
    beyond: str = "",
    asked: Callable[..., Comparison] = compare,
) -> Ablation:
    """Climbs the ladder up to the first rung that diverges, and, if `deep`, looks for the operator there.
    What the rungs up to the stage `beyond` show is another divergence: they are recorded, and no more.
    `asked` runs a program under a rung.
    """
    steps: list[Step] = []
    rungs = ladder(subject)
    first = 1 + next((place for place, rung in enumerate(rungs) if rung.stage == beyond), -1)
    for place, rung in enumerate(rungs):
        row = _row(program, rung, device, asked)
        steps.append(Step(rung.stage, rung.subject, row.verdict.value, row.symptom, row.reason))
        if place >= first and row.verdict.is_divergence and not row.set_aside:
            found = Ablation(tuple(steps), _stage(rung, row))
            return _with_operator(found, program, rung, row, device) if deep else found
    return Ablation(tuple(steps))


def _row(
    program: Program, rung: Rung, device: torch.device, asked: Callable[..., Comparison] = compare
) -> Row:
    try:
        return asked(program, resolve(rung.subject), device).row
    except GradparityError as error:
        return Row(
            program.case.address,
            0,
            "",
            rung.subject,
            Verdict.UNSUPPORTED,
            "set-aside",
            str(error),
            set_aside=True,
        )


def _stage(rung: Rung, row: Row) -> str:
    """The live path's exact lowering captures and orders: which of the two, the verdict tells."""
    if rung.stage != "capture and order":
        return rung.stage
    return "order" if row.verdict is Verdict.HOOK_ORDER else "capture"


def _with_operator(found: Ablation, program: Program, rung: Rung, row: Row, device: torch.device) -> Ablation:
    if row.symptom.removesuffix("-bits") not in VALUES:
        return found
    if rung.stage in ("inductor", "backend"):
        part = bisected(lambda: _agrees(program, rung, device))
        how = "torch._inductor.compiler_bisector"
        return replace(found, operator=part.describe(), how=how) if part is not None else found
    calls = parting(program, resolve(rung.subject), device)
    how = "hashes of what every call returns, in eager and under the subject"
    is_named = calls.operator and (rung.stage in INTERPRETED or calls.is_seen)
    return replace(found, operator=calls.operator, how=how) if is_named else found


def _agrees(program: Program, rung: Rung, device: torch.device) -> bool:
    row = _row(program, rung, device)
    return not row.verdict.is_divergence
