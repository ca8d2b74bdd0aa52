"""differential: one case under one subject, from program to row.

In: a Program, a Subject, device. Out: a Row. Eager runs twice first; the float64 reference only when bits
differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from gradparity.corpus.base import Program
from gradparity.errors import GradparityError
from gradparity.observe import observe
from gradparity.oracles.attribution import not_stocks_own
from gradparity.oracles.evidence import Evidence, Reference
from gradparity.oracles.judge import Judgement, judge
from gradparity.oracles.values import SYMPTOMS
from gradparity.outcome import Outcome
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.eager import Eager
from gradparity.verdict import FALLBACK, Row, Verdict, row_of

EAGER, AGAIN = Eager("eager"), "eager, run again"

ONLY_SET = "it diverges only under torch._inductor.config.fallback_random, which gradparity had set"

CONFIRMATIONS = 200
CONFIRMATION_SECONDS = 2.0
"""How often, and for how long at most, eager runs again after a divergence in values: some LAPACK routines
change their last bits in one run of fifty.
"""

NO_DETERMINISTIC = "does not have a deterministic implementation"
"""What torch warns of when it is asked to be deterministic and cannot."""


@dataclass(frozen=True)
class Comparison:
    """Everything known after a case ran: the row, and the evidence that it was judged by, unless the case is
    broken or set aside unrun. `beside`: whose run the evidence compares with eager's first.
    """

    row: Row
    evidence: Evidence | None
    beside: str = ""


def compare(
    program: Program,
    subject: Subject,
    device: torch.device,
    confirm: bool = True,
    first: Outcome | None = None,
) -> Comparison:
    """Runs and judges one case. Errors of the harness itself become a CRASH row with symptom
    "broken-case". `confirm`: whether eager runs again and again after a divergence in values; `first`: what
    eager's first run showed, if it ran already.
    """
    case = program.case
    why = program.skip.get(subject.name)
    if why is not None:
        return _set_aside(program, subject, "set-aside", why)
    try:
        return _compare(program, subject, device, confirm, first)
    except GradparityError as error:
        return Comparison(row_of(case, subject.name, Verdict.CRASH, "broken-case", str(error)), None)


def _compare(
    program: Program, subject: Subject, device: torch.device, confirm: bool, known: Outcome | None
) -> Comparison:
    case, dtype = program.case, torch.float32
    first = known or observe(case, program.body, EAGER, dtype, device)
    if program.untried and first.raised is not None:
        reason = f"eager raises {first.raised.type}: {first.raised.message}"
        return _set_aside(program, subject, "eager-raises", reason)
    again = observe(case, program.body, EAGER, dtype, device)
    repeat = judge(Evidence(first, again, bitwise=True))
    if repeat.verdict is not Verdict.AGREE:
        return _nondeterministic(program, subject.name, first, again, repeat)
    subject.reset(program.cold)
    outcome = observe(case, program.body, subject, dtype, device)
    evidence = Evidence(
        eager=first,
        subject=outcome,
        bitwise=subject.bitwise,
        may_refuse=subject.may_refuse,
        own_random=subject.own_random,
        rounds_to=program.rounds_to,
        reference=lambda: _reference(program, device),
    )
    row = _row(program, subject, outcome, evidence)
    if row.verdict.is_divergence and subject.as_shipped is not None:
        subject.reset(program.cold)
        outcome = observe(case, program.body, subject.as_shipped, dtype, device)
        shipped = replace(evidence, subject=outcome, notes=[])
        agreed = _row(program, subject, outcome, shipped)
        if agreed.verdict is Verdict.AGREE:
            return Comparison(replace(agreed, notes=(*agreed.notes, ONLY_SET)), shipped, subject.name)
    for stock in (subject.stock, subject.rounds_as):
        is_asked = stock is subject.stock or row.symptom in SYMPTOMS.values()
        if stock is not None and is_asked and row.verdict.is_divergence and not row.stocks_own:
            row = _attributed(program, subject, stock, evidence, row, device)
    found = Comparison(row, evidence, subject.name)
    return confirmed(program, found, device) if confirm and not row.stocks_own else found


def confirmed(program: Program, found: Comparison, device: torch.device) -> Comparison:
    """The comparison, unless it found other values and eager does not repeat its own."""
    row, evidence = found.row, found.evidence
    if evidence is None:
        return found
    if row.verdict is Verdict.DIVERGE and row.symptom.removesuffix("-bits") in SYMPTOMS.values():
        until = time.monotonic() + CONFIRMATION_SECONDS
        for _ in range(CONFIRMATIONS):
            again = observe(program.case, program.body, EAGER, torch.float32, device)
            repeat = judge(Evidence(evidence.eager, again, bitwise=True))
            if repeat.verdict is not Verdict.AGREE:
                return _nondeterministic(program, row.subject, evidence.eager, again, repeat)
            if time.monotonic() > until:
                break
        if declared := _declared_nondeterministic(program, evidence, device):
            aside = _nondeterministic(program, row.subject, evidence.eager, evidence.subject, declared)
            return replace(aside, beside=row.subject)
    return found


def _set_aside(program: Program, subject: Subject, symptom: str, why: str) -> Comparison:
    """Of a case that says nothing about the subject."""
    row = row_of(program.case, subject.name, Verdict.UNSUPPORTED, symptom, why)
    return Comparison(replace(row, set_aside=True), None)


def _attributed(
    program: Program, subject: Subject, stock: Subject, evidence: Evidence, row: Row, device: torch.device
) -> Row:
    """The row, marked if this form of stock torch diverges in all that the subject does, and the subject
    answers for nothing of it.
    """
    stock.reset(program.cold)
    outcome = observe(program.case, program.body, stock, torch.float32, device)
    only_rounds = stock is not subject.stock
    own = not_stocks_own(evidence, outcome, subject.answers_for_silent and not only_rounds, only_rounds)
    stock_free_only = subject.blame is Blame.only_stock_free and not only_rounds
    if own is None or (stock_free_only and _diverges(evidence, outcome)):
        return replace(row, stocks_own=True, stage=stock.stage)
    told = {name: getattr(own, name) for name in ("verdict", "symptom", "reason", "place")}
    return replace(row, stage=subject.stage, **told)


def _diverges(evidence: Evidence, stock: Outcome) -> bool:
    """Whether stock itself does otherwise than eager."""
    return judge(replace(evidence, subject=stock, bitwise=False, notes=[])).verdict.is_divergence


def _declared_nondeterministic(
    program: Program, evidence: Evidence, device: torch.device
) -> Judgement | None:
    """A finding if bits differ within the tolerance, and torch says that an operation has no deterministic
    implementation: atomic additions on a GPU may repeat themselves hundreds of times.
    """
    loose = replace(evidence, bitwise=False, notes=[])
    if not evidence.bitwise or judge(loose).verdict is not Verdict.AGREE:
        return None
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        asked = observe(program.case, program.body, EAGER, torch.float32, device)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    declared = [warning.text for warning in asked.warnings if NO_DETERMINISTIC in warning.text]
    return Judgement(Verdict.NONDETERMINISTIC, "declared", declared[0].split(",")[0]) if declared else None


def _nondeterministic(
    program: Program, subject: str, first: Outcome, again: Outcome, repeat: Judgement
) -> Comparison:
    reason = f"eager may differ from itself: {repeat.reason}"
    row = row_of(program.case, subject, Verdict.NONDETERMINISTIC, repeat.symptom, reason)
    return Comparison(replace(row, set_aside=True), Evidence(first, again, bitwise=True), AGAIN)


def _row(program: Program, subject: Subject, outcome: Outcome, evidence: Evidence) -> Row:
    found = judge(evidence)
    bare = row_of(program.case, subject.name, found.verdict, found.symptom, found.reason)
    return replace(
        bare,
        notes=outcome.notes + found.notes,
        place=found.place,
        fell_back=any(FALLBACK.match(note) for note in outcome.notes),
        set_aside=found.verdict.is_set_aside,
        compiles=outcome.compiles,
        seconds=round(outcome.seconds, 6),
    )


def _reference(program: Program, device: torch.device) -> Reference:
    if not program.fp64:
        return Reference(None, "the case declares none")
    try:
        return Reference(observe(program.case, program.body, EAGER, torch.float64, device))
    except GradparityError as error:
        return Reference(None, str(error))
