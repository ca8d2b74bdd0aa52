"""Which calls of two timelines differ.

In: Evidence, or two hook events. Out: whether they differ, and the first place where they do. Bits of
payloads count only for subjects that promise them.
"""

from __future__ import annotations

from itertools import zip_longest

from gradparity.oracles.distance import same_bits
from gradparity.oracles.evidence import Evidence
from gradparity.outcome import HookEvent, Payload, TensorRecord


def first_differing_call(evidence: Evidence) -> int | None:
    """The index of the first call that differs in site, kind or payload; None if none does."""
    for place, (eager, subject) in enumerate(zip_longest(evidence.eager.events, evidence.subject.events)):
        if differs(eager, subject, evidence):
            return place
    return None


def differs(eager: HookEvent | None, subject: HookEvent | None, evidence: Evidence) -> bool:
    """Whether two calls differ; payload bits count only for subjects that promise them."""
    if eager is None or subject is None:
        return True
    if (eager.site, eager.kind) != (subject.site, subject.kind):
        return True
    return payload_differs(eager.payload, subject.payload, evidence.bitwise)


def payload_differs(eager: Payload, subject: Payload, bitwise: bool) -> bool:
    """Whether two payloads differ in structure, dtype or shape, or in bits that are promised."""
    if isinstance(eager, TensorRecord) and isinstance(subject, TensorRecord):
        if (eager.dtype, eager.shape) != (subject.dtype, subject.shape):
            return True
        return bitwise and not same_bits(eager, subject)
    if isinstance(eager, tuple) and isinstance(subject, tuple) and len(eager) == len(subject):
        return any(payload_differs(one, two, bitwise) for one, two in zip(eager, subject, strict=True))
    if isinstance(eager, float) and isinstance(subject, float):
        return bitwise and eager != subject and not (eager != eager and subject != subject)
    return eager is not subject and (isinstance(eager, TensorRecord) or eager != subject)
