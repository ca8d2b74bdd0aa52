"""Metadata: what is there and of what kind: None or tensor, class, dtype, shape, layout, strides,
requires_grad.

In: Evidence. Out: a Finding for the first leaf whose metadata differs. Strides count where a dimension is
longer than 1, and of a subject that promises eager's bits in every dimension: kernels choose a memory format
by them. They count in gradients and values; in hook payloads a difference of strides is only noted.
"""

from __future__ import annotations

from gradparity.oracles.evidence import Evidence, Pair
from gradparity.outcome import Payload, TensorRecord
from gradparity.verdict import Finding, Verdict


def grad_metadata(evidence: Evidence) -> Finding | None:
    """Compares every leaf's metadata."""
    if evidence.eager.raised is None and evidence.subject.raised is None:
        ours, theirs = [v.name for v in evidence.eager.values], [v.name for v in evidence.subject.values]
        if ours != theirs:
            return Finding(Verdict.DIVERGE, "values-observed", f"eager shows {ours}, subject {theirs}")
    for pair in evidence.pairs:
        found = leaf_metadata(pair, evidence)
        if found is not None:
            return found
    return None


def leaf_metadata(pair: Pair, evidence: Evidence) -> Finding | None:
    """Compares one leaf's metadata."""
    eager, subject = pair.eager, pair.subject
    if isinstance(eager, TensorRecord) and isinstance(subject, TensorRecord):
        return _tensors(pair, eager, subject, evidence)
    if _kind(eager) != _kind(subject):
        symptom = f"{pair.role}-none" if None in (eager, subject) else f"{pair.role}-kind"
        reason = f"{pair.label}: eager {_said(eager)}, subject {_said(subject)}"
        return Finding(Verdict.DIVERGE, symptom, reason, pair.place)
    return None


def _tensors(pair: Pair, eager: TensorRecord, subject: TensorRecord, evidence: Evidence) -> Finding | None:
    for what in ("cls", "dtype", "shape", "layout", "requires_grad"):
        one, two = getattr(eager, what), getattr(subject, what)
        if one != two:
            symptom = f"{pair.role}-{'class' if what == 'cls' else what}"
            reason = f"{pair.label}: {what} is {one} in eager, {two} in subject"
            return Finding(Verdict.DIVERGE, symptom, reason, pair.place)
    if _strides(eager, evidence.bitwise) != _strides(subject, evidence.bitwise):
        reason = f"{pair.label}: strides are {eager.strides} in eager, {subject.strides} in subject"
        if pair.role != "event":
            reason = f"{reason}, shape {eager.shape}"
            return Finding(Verdict.DIVERGE, f"{pair.role}-strides", reason, pair.place)
        if evidence.bitwise:
            evidence.notes.append(reason)
    return None


def _strides(record: TensorRecord, of_all: bool) -> tuple[int, ...] | None:
    """Strides of the dimensions longer than 1, or `of_all`; None where strides mean nothing."""
    if record.strides is None or 0 in record.shape:
        return None
    pairs = zip(record.strides, record.shape, strict=True)
    return tuple(stride for stride, size in pairs if of_all or size > 1)


def _kind(payload: Payload) -> str:
    if isinstance(payload, TensorRecord):
        return "tensor"
    if isinstance(payload, tuple):
        return f"tuple of {len(payload)}"
    return type(payload).__name__


def _said(payload: Payload) -> str:
    return payload.describe() if isinstance(payload, TensorRecord) else repr(payload)[:60]
