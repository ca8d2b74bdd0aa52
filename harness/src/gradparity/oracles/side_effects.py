"""Side effects: what the run left behind besides gradients and values.

In: Evidence. Out: a Finding for the first of these that differs: the program's log, which tensors autograd
knows to have changed (eager moved the version counter, the subject did not), the state of the random number
generators. By how much a counter moved is only noted: a compiler may write once where eager writes twice,
and it may count a write that eager does not, as batch norm's.
"""

from __future__ import annotations

from gradparity.oracles.evidence import Evidence
from gradparity.outcome import Payload, describe, fingerprint
from gradparity.verdict import Finding, Verdict


def side_effects(evidence: Evidence) -> Finding | None:
    """Compares log, version counters and random state. After an exception of one side only, nothing."""
    if (evidence.eager.raised is None) != (evidence.subject.raised is None):
        return None
    return _log(evidence) or _versions(evidence) or _random(evidence)


def _log(evidence: Evidence) -> Finding | None:
    eager, subject = evidence.eager.log, evidence.subject.log
    if len(eager) != len(subject):
        reason = f"the program's log has {len(eager)} entries in eager, {len(subject)} under the subject"
        return Finding(Verdict.DIVERGE, "log", reason)
    if evidence.other_numbers:
        return None
    for place, (one, two) in enumerate(zip(eager, subject, strict=True)):
        if _differ(one, two, evidence.bitwise):
            reason = f"log entry {place}: eager {describe(one)}, subject {describe(two)}"
            return Finding(Verdict.DIVERGE, "log", reason)
    return None


def _differ(eager: Payload, subject: Payload, bitwise: bool) -> bool:
    """Bits where they are promised; else everything that is no tensor and no float."""
    if bitwise:
        return fingerprint(eager) != fingerprint(subject)
    if isinstance(eager, tuple) and isinstance(subject, tuple) and len(eager) == len(subject):
        return any(_differ(one, two, bitwise) for one, two in zip(eager, subject, strict=True))
    if type(eager) is not type(subject):
        return True
    return isinstance(eager, (bool, int, str)) and eager != subject


def _versions(evidence: Evidence) -> Finding | None:
    theirs = {item.name: item.changes for item in evidence.subject.state}
    for item in evidence.eager.state:
        ours, other = item.changes, theirs.get(item.name)
        if ours is None or other is None or ours == other:
            continue
        reason = f"{item.name}: version counter rose by {ours} in eager, by {other} under the subject"
        if ours > 0 and other == 0:
            return Finding(Verdict.DIVERGE, "state-version", reason)
        if evidence.bitwise:
            evidence.notes.append(reason)
    return None


def _random(evidence: Evidence) -> Finding | None:
    eager, subject = evidence.eager, evidence.subject
    if evidence.own_random or eager.random == subject.random:
        return None
    moved = [name for name, outcome in (("eager", eager), ("the subject", subject)) if outcome.drew]
    reason = f"the random state after the run differs; it was moved by {' and by '.join(moved) or 'neither'}"
    return Finding(Verdict.DIVERGE, "random-state", reason)
