"""Hook order: the same sites and kinds, as often, in the same order as in eager.

In: Evidence. Out: a Finding that names the first place where the two timelines part. (What each hook was
given is compared by the oracles for metadata and values, call by call, once the order is the same.)
"""

from __future__ import annotations

from collections import Counter

from gradparity.oracles.evidence import Evidence, sequence
from gradparity.verdict import Finding, Verdict

Step = tuple[str, str]


def hook_order(evidence: Evidence) -> Finding | None:
    """Compares the two timelines."""
    if evidence.same_events:
        return None
    eager, subject = sequence(evidence.eager.events), sequence(evidence.subject.events)
    place = first_difference(eager, subject)
    reason = f"call {place}: eager {_at(eager, place)}, subject {_at(subject, place)}"
    counts = _counts(eager, subject)
    kinds = f"{_kind(eager, place)} for {_kind(subject, place)}"
    if counts:
        return Finding(Verdict.HOOK_ORDER, "hook-count", f"{counts}; {reason}", kinds)
    return Finding(Verdict.HOOK_ORDER, "hook-order", reason, kinds)


def first_difference(eager: list[Step], subject: list[Step]) -> int:
    """The first index at which two sequences differ, or the length of the shorter."""
    for place, (one, two) in enumerate(zip(eager, subject, strict=False)):
        if one != two:
            return place
    return min(len(eager), len(subject))


def _counts(eager: list[Step], subject: list[Step]) -> str:
    missing, extra = Counter(eager) - Counter(subject), Counter(subject) - Counter(eager)
    parts = []
    if missing:
        parts.append(f"{sum(missing.values())} call(s) missing ({_named(missing)})")
    if extra:
        parts.append(f"{sum(extra.values())} call(s) too many ({_named(extra)})")
    return ", ".join(parts)


def _named(steps: Counter[Step]) -> str:
    return ", ".join(f"{kind} {site}" for site, kind in list(steps)[:3]) + (", …" if len(steps) > 3 else "")


def _kind(steps: list[Step], place: int) -> str:
    return steps[place][1] if place < len(steps) else "nothing"


def _at(steps: list[Step], place: int) -> str:
    return f"{steps[place][1]} {steps[place][0]}" if place < len(steps) else "nothing"
