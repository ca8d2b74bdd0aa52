"""exhibit: what a report shows of one comparison, as plain data that leaves the worker.

In: a Comparison. Out: a dictionary: errors of leaves; for divergences both timelines, exceptions,
warnings, and what eager shows where they differ.
"""

from __future__ import annotations

from typing import Any

from gradparity.differential import Comparison
from gradparity.oracles.differences import differs
from gradparity.oracles.eager_side import eager_side
from gradparity.oracles.evidence import Evidence
from gradparity.oracles.values import LeafError, errors
from gradparity.outcome import HookEvent, Outcome, TensorRecord

MOST_EVENTS = 60
MOST_LEAVES = 40


def exhibit(comparison: Comparison) -> dict[str, Any]:
    """What there is to show. Of an agreement: the worst error by dtype, if any bit differs."""
    evidence = comparison.evidence
    if evidence is None:
        return {}
    row = comparison.row
    if not row.verdict.is_divergence or row.set_aside:
        worst = _worst(evidence) if not evidence.bitwise else []
        return {"errors": worst} if worst else {}
    found: dict[str, Any] = {"errors": _leaves(evidence)[:MOST_LEAVES]}
    if expected := eager_side(evidence, row):
        found["expected"] = expected
    if evidence.eager.events or evidence.subject.events:
        found["timelines"] = timelines(evidence)
    for name, outcome in (("eager", evidence.eager), ("subject", evidence.subject)):
        if outcome.raised is not None:
            found.setdefault("raised", {})[name] = f"{outcome.raised.type}: {outcome.raised.message}"[:2000]
        if outcome.warnings:
            found.setdefault("warnings", {})[name] = _warnings(outcome)
    return found


def timelines(evidence: Evidence) -> dict[str, Any]:
    """Both sides' calls as texts, and the places where they differ."""
    eager, subject = evidence.eager.events[:MOST_EVENTS], evidence.subject.events[:MOST_EVENTS]
    places = range(max(len(eager), len(subject)))
    at = [(_get(eager, place), _get(subject, place)) for place in places]
    return {
        "eager": [event.describe() for event in eager],
        "subject": [event.describe() for event in subject],
        "differ": [place for place, (one, two) in enumerate(at) if differs(one, two, evidence)],
    }


def _get(events: tuple[HookEvent, ...], place: int) -> HookEvent | None:
    return events[place] if place < len(events) else None


def _warnings(outcome: Outcome) -> list[str]:
    return [f"{item.category}: {item.text}"[:300] for item in outcome.warnings[:10]]


def _leaves(evidence: Evidence) -> list[dict[str, Any]]:
    dtypes = {
        pair.label: str(pair.eager.dtype).removeprefix("torch.")
        for pair in evidence.pairs
        if isinstance(pair.eager, TensorRecord)
    }
    return [_plain(item, dtypes[item.label]) for item in errors(evidence)]


def _plain(item: LeafError, dtype: str) -> dict[str, Any]:
    return {
        "what": item.label,
        "dtype": dtype,
        "size": item.magnitude,
        "off": item.difference,
        "eager": item.eager_error,
        "subject": item.subject_error,
        "allowed": item.allowed,
        "judged": item.verdict.value,
    }


def _worst(evidence: Evidence) -> list[dict[str, Any]]:
    """By dtype, the leaf that uses up most of what is allowed."""
    worst: dict[str, dict[str, Any]] = {}
    for leaf in _leaves(evidence):
        if leaf["off"] and _used(leaf) >= _used(worst.get(leaf["dtype"], {})):
            worst[leaf["dtype"]] = leaf
    return list(worst.values())


def _used(leaf: dict[str, Any]) -> float:
    error = leaf.get("subject")
    error = leaf.get("off", -1.0) if error is None else error
    return float(error) / (leaf.get("allowed") or 1.0)
