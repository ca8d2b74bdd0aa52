"""judge: the oracles in their order, and one answer from all of them.

In: Evidence. Out: a Judgement. The first finding decides; what later oracles find is kept as notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradparity.oracles.evidence import Evidence
from gradparity.oracles.exceptions import exceptions
from gradparity.oracles.grad_metadata import grad_metadata
from gradparity.oracles.hook_order import hook_order
from gradparity.oracles.invariants import invariants
from gradparity.oracles.side_effects import side_effects
from gradparity.oracles.values import values
from gradparity.verdict import Finding, Verdict

Oracle = Callable[[Evidence], Finding | None]

ORACLES: tuple[Oracle, ...] = (exceptions, hook_order, grad_metadata, invariants, values, side_effects)
"""In this order: an exception explains missing events, a wrong order explains other payloads, and so on."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one case under one subject, with symptom and reason, and remarks."""

    verdict: Verdict
    symptom: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    place: str = ""


def judge(evidence: Evidence) -> Judgement:
    """Asks all oracles."""
    found = [finding for finding in (oracle(evidence) for oracle in ORACLES) if finding is not None]
    if not found:
        return Judgement(Verdict.AGREE, notes=tuple(evidence.notes))
    first, *rest = found
    if first.verdict is Verdict.UNSUPPORTED:
        rest = []
    notes = (*(item.note for item in rest), *evidence.notes)
    return Judgement(first.verdict, first.symptom, first.reason, notes, first.place)
