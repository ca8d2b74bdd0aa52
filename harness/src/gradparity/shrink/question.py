"""question: does a smaller script still show the same divergence?

In: a subject, the row of the divergence, and what eager raised. Out: a function that the shrinker asks. It
runs the script as the campaign does, so the symptom and the place of the divergence stay the same, and so
does what eager does.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradparity.case import Case
from gradparity.corpus.generated import scripted
from gradparity.differential import Comparison
from gradparity.errors import CaseTimeout
from gradparity.generate.script import Script
from gradparity.shrink.shrinker import Question
from gradparity.signature import signature_of
from gradparity.subjects.base import Subject
from gradparity.work import alarm, compared


def still_diverges(
    found: Comparison, case: Case, subject: Subject, device: torch.device, timeout: float
) -> Question:
    """Whether a script diverges as the comparison `found` did."""
    wanted, raised = signature_of(found.row), _raised(found)
    knows_stage = subject.name == found.row.subject and wanted.stage

    def asked(script: Script) -> bool:
        try:
            with alarm(timeout):
                other = compared(scripted(case, script), subject, device, found.row.checks, confirm=False)
        except (CaseTimeout, Exception):  # out of time, or so odd that it cannot be judged
            return False
        shown = signature_of(other.row if knows_stage else replace(other.row, stage=wanted.stage))
        return not other.row.set_aside and shown == wanted and _raised(other) == raised

    return asked


def _raised(found: Comparison) -> str | None:
    """The type of what eager raised, if it did."""
    error = found.evidence.eager.raised if found.evidence is not None else None
    return None if error is None else error.type
