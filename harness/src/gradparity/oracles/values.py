"""Values: equal bits where the subject promises them, else close to a float64 reference.

In: Evidence. Out: a Finding for the first leaf that is wrong: DIVERGE, or REF_UNSTABLE where eager itself is
far from the reference. The first wrong leaf of each further symptom is noted. Values that went through a
lower dtype, as eager's did not, are wrong however near they are. NaN equals NaN, and 0.0 equals -0.0 (with a
note, for subjects that promise bits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradparity.oracles.distance import distance, magnitude, rounded_through, same_bits, signed_zero
from gradparity.oracles.evidence import Evidence, Pair
from gradparity.oracles.tolerances import UNSTABLE, Tolerance, tolerance
from gradparity.outcome import Payload, TensorRecord
from gradparity.verdict import Finding, Verdict

ROUNDED = 4
"""So many plain tolerances apart may values be that are rounded otherwise and have no float64 reference."""
CANCELLED = 1e-6
"""Gradients smaller than this share of the values are what rounding leaves of nothing."""
SYMPTOMS = {"grad": "grad-values", "value": "values", "state": "state-values", "event": "hook-payload"}


@dataclass(frozen=True)
class LeafError:
    """How far one leaf is from eager and from the reference; errors are largest absolute differences."""

    label: str
    magnitude: float = 0.0
    difference: float = 0.0
    eager_error: float | None = None
    subject_error: float | None = None
    allowed: float = 0.0
    verdict: Verdict = Verdict.AGREE
    way: str = "equal bits"

    def describe(self) -> str:
        """The numbers in words."""
        if self.subject_error is None:
            return f"differs from eager by {self.difference:.3g} (allowed {self.allowed:.3g}; {self.way})"
        return (
            f"error {self.subject_error:.3g} {self.way}, eager's own {self.eager_error:.3g}, "
            f"allowed {self.allowed:.3g}, magnitude {self.magnitude:.3g}"
        )


def values(evidence: Evidence) -> Finding | None:
    """Compares the data of every leaf whose metadata agrees."""
    if evidence.other_numbers:
        return None
    found: dict[str, Finding] = {}
    for pair in evidence.pairs:
        if (one := leaf_values(pair, evidence)) is not None:
            found.setdefault(one.symptom, one)
    wrong = [one for one in found.values() if one.verdict is not Verdict.REF_UNSTABLE]
    evidence.notes += [one.note for one in wrong[1:]]
    return next(iter(wrong or found.values()), None)


def errors(evidence: Evidence) -> Iterator[LeafError]:
    """The error of every pair of comparable tensors, for the table that `gradparity show` prints; of watched
    tensors only those that differ.
    """
    for pair in evidence.pairs:
        records = _records(pair)
        if records is None or pair.role == "event":
            continue
        if pair.role != "state" or not same_bits(*records):
            yield _measure(pair.label, *records, evidence)


def leaf_values(pair: Pair, evidence: Evidence) -> Finding | None:
    """Compares one leaf's data, if its metadata agrees."""
    symptom, records = SYMPTOMS[pair.role], _records(pair)
    if records is None:
        if _plain_differ(pair.eager, pair.subject, evidence.bitwise):
            reason = f"{pair.label}: eager {pair.eager!r}, subject {pair.subject!r}"
            return Finding(Verdict.DIVERGE, symptom, reason, f"{pair.place} {type(pair.eager).__name__}")
        return None
    if same_bits(*records):
        if evidence.bitwise and signed_zero(*records):
            evidence.notes.append(f"{pair.label}: the sign of a zero differs")
        return None
    found = _measure(pair.label, *records, evidence)
    low = None if evidence.bitwise or evidence.rounds_to else rounded_through(*records)
    if low is not None:
        reason = f"{pair.label}: every value of the subject is one of {low}, eager's are not"
        return Finding(Verdict.DIVERGE, f"{symptom}-rounded", reason, pair.place)
    if found.verdict is Verdict.AGREE:
        return None
    if evidence.bitwise:
        symptom += "-bits"
    elif found.verdict is Verdict.REF_UNSTABLE:
        symptom = "ref-unstable"
    return Finding(found.verdict, symptom, f"{pair.label}: {found.describe()}", pair.place)


def may_be_rounding(pair: Pair, evidence: Evidence) -> bool:
    """Whether rounding may be why a leaf differs: it has a float64 reference, or the difference is small."""
    records, reference = _records(pair), evidence.reference_leaves.get(pair.label)
    if records is None or (row := tolerance(records[0].dtype)) is None:
        return False
    if isinstance(reference, TensorRecord) and reference.shape == records[0].shape:
        return True
    return distance(*records) <= ROUNDED * row.plain * magnitude(records[0])


def _measure(label: str, eager: TensorRecord, subject: TensorRecord, evidence: Evidence) -> LeafError:
    size = magnitude(eager)
    if same_bits(eager, subject):
        return LeafError(label, size)
    row = tolerance(eager.dtype)
    found = LeafError(label, size, distance(eager, subject), verdict=Verdict.DIVERGE)
    if evidence.bitwise or row is None:
        return replace(found, way="must be equal")
    if found.difference == math.inf:
        return replace(found, way="inf or NaN in other places")
    speck = row.speck * min(1.0, _scale(evidence))
    plain = row.plain * size + speck
    reference = evidence.reference_leaves.get(label)
    if not isinstance(reference, TensorRecord) or reference.shape != eager.shape:
        why = evidence.why_no_reference or "it shows something else"
        low = None if evidence.rounds_to is None else tolerance(evidence.rounds_to)
        if low is not None:
            plain = max(row.plain, low.plain) * size + speck
        verdict = Verdict.AGREE if found.difference <= plain else Verdict.DIVERGE
        return replace(found, allowed=plain, verdict=verdict, way=f"no float64 reference: {why}")
    mine, theirs = distance(eager, reference), distance(subject, reference)
    found = replace(found, eager_error=mine, subject_error=theirs)
    return _against(found, row, row.floor * magnitude(reference) + speck, plain)


def _against(found: LeafError, row: Tolerance, floor: float, plain: float) -> LeafError:
    """Judges measured errors: by eager's own error, or, where that is huge, by the difference from eager."""
    mine, theirs = found.eager_error or 0.0, found.subject_error or 0.0
    if mine > UNSTABLE * found.magnitude + floor:
        verdict = Verdict.AGREE if found.difference <= plain else Verdict.REF_UNSTABLE
        return replace(found, allowed=plain, verdict=verdict, way="(eager is far from float64)")
    allowed = row.multiple * mine + floor
    verdict = Verdict.AGREE if theirs <= allowed else Verdict.DIVERGE
    return replace(found, allowed=allowed, verdict=verdict, way="against float64")


def _records(pair: Pair) -> tuple[TensorRecord, TensorRecord] | None:
    eager, subject = pair.eager, pair.subject
    if not isinstance(eager, TensorRecord) or not isinstance(subject, TensorRecord):
        return None
    return (eager, subject) if eager.shape == subject.shape and eager.dtype == subject.dtype else None


def _plain_differ(eager: Payload, subject: Payload, bitwise: bool) -> bool:
    if type(eager) is not type(subject) or isinstance(eager, TensorRecord):
        return False  # the metadata oracle's business
    if isinstance(eager, float) and isinstance(subject, float):
        if math.isnan(eager) and math.isnan(subject):
            return False
        return eager != subject if bitwise else not math.isclose(eager, subject, rel_tol=1e-4, abs_tol=1e-6)
    return eager != subject


def _scale(evidence: Evidence) -> float:
    """The largest magnitude among the gradients; that of the values, where all gradients cancel to nothing
    beside them and so give no scale.
    """
    grads, shown = (_largest(evidence, role) for role in ("grad", "value"))
    return shown if grads < CANCELLED * shown else grads


def _largest(evidence: Evidence, role: str) -> float:
    records = [pair.eager for pair in evidence.pairs if pair.role == role]
    return max((magnitude(item) for item in records if isinstance(item, TensorRecord)), default=0.0)
