"""Invariants: what holds within one run, whatever the numbers are, as that the mask seen in an output is the
mask seen in the gradient.

In: Evidence. Out: a Finding for the first invariant that eager keeps and the subject breaks. An invariant
that eager breaks too says nothing about the subject.
"""

from __future__ import annotations

from gradparity.oracles.evidence import Evidence
from gradparity.verdict import Finding, Verdict


def invariants(evidence: Evidence) -> Finding | None:
    """Compares what held in eager with what held under the subject, by name."""
    kept = {item.name for item in evidence.eager.invariants if item.holds}
    for item in evidence.subject.invariants:
        if not item.holds and item.name in kept:
            reason = f"invariant {item.name} holds in eager, not under the subject"
            return Finding(Verdict.DIVERGE, "invariant", f"{reason}: {item.detail or 'no detail'}")
    return None
