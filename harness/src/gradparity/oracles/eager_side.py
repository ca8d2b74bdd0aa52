"""What eager shows where the subject differs, literally: values, calls, the exception.

In: Evidence, and the verdict's symptom and reason. Out: one sentence for a draft; "" if the reason is about
something that no single value shows, such as a cost.
"""

from __future__ import annotations

import math

import torch

from gradparity.oracles.distance import same_bits
from gradparity.oracles.evidence import Evidence, Pair
from gradparity.outcome import Outcome, Payload, TensorRecord, describe
from gradparity.verdict import Row, Verdict

MOST_NUMBERS = 8
MOST_CALLS = 20
MOST_LEAVES = 3
"""So many numbers of a tensor, calls of hooks, and results beside an exception are written out."""


def eager_side(evidence: Evidence, row: Row) -> str:
    """What eager shows."""
    eager, subject = evidence.eager, evidence.subject
    if eager.raised is not None and (subject.raised is None or subject.raised.type != eager.raised.type):
        return f"it raises `{eager.raised.type}: {' '.join(eager.raised.message.split())[:300]}`"
    if eager.raised is None and subject.raised is not None:
        return f"it raises nothing{_results(eager)}"
    if row.verdict is Verdict.HOOK_ORDER:
        return _calls(eager)
    label = row.reason.partition(": ")[0]
    if (pair := next((pair for pair in evidence.pairs if pair.label == label), None)) is not None:
        return _leaf(pair)
    return _side_effect(eager, row)


def _results(eager: Outcome) -> str:
    leaves = [(item.name, item.value) for item in eager.grads]
    leaves += [(item.name, item.value) for item in eager.values]
    told = ", ".join(f"`{name}` {literal(value)}" for name, value in leaves[:MOST_LEAVES])
    return f", and gives {told}" if told else ""


def _calls(eager: Outcome) -> str:
    calls = [f"{event.kind} {event.site}" for event in eager.events]
    more = f", and {len(calls) - MOST_CALLS} more" if len(calls) > MOST_CALLS else ""
    return f"it calls, in this order: {', '.join(calls[:MOST_CALLS]) or 'nothing'}{more}"


def _leaf(pair: Pair) -> str:
    eager, subject = pair.eager, pair.subject
    told = f"`{pair.label}` is {literal(eager)}"
    if isinstance(eager, TensorRecord) and isinstance(subject, TensorRecord) and not _is_short(eager):
        told += _worst(eager, subject)
    return told


def _worst(eager: TensorRecord, subject: TensorRecord) -> str:
    """The element that differs most."""
    if len(eager.parts) != 1 or eager.shape != subject.shape or same_bits(eager, subject):
        return ""
    one, two = eager.parts[0], subject.parts[0]
    if one.shape != two.shape or tuple(one.shape) != eager.shape:
        return ""
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    off = (one.to(wide) - two.to(wide)).abs()
    off[torch.isnan(one.to(wide)) & torch.isnan(two.to(wide))] = 0.0
    index = [int(place) for place in torch.unravel_index(off.nan_to_num(math.inf).argmax(), one.shape)]
    return f"; element {index} is {_number(one[tuple(index)])}, not {_number(two[tuple(index)])}"


def literal(payload: Payload) -> str:
    """A payload with its numbers, if they are few, and its metadata."""
    if not isinstance(payload, TensorRecord):
        return describe(payload)[:300]
    dtype = str(payload.dtype).removeprefix("torch.")
    strides = "" if payload.strides is None else f", strides {payload.strides}"
    kind = "" if payload.cls == "Tensor" else f" of class {payload.cls}"
    told = f"a {dtype} tensor{kind} of shape {payload.shape}{strides}"
    if not _is_short(payload):
        return told
    numbers = ", ".join(_number(one) for part in payload.parts for one in part.reshape(-1))
    return f"{told}: [{numbers}]"


def _is_short(record: TensorRecord) -> bool:
    return record.digest is None and sum(part.numel() for part in record.parts) <= MOST_NUMBERS


def _number(one: torch.Tensor) -> str:
    value = one.item()
    return f"{value:.9g}" if isinstance(value, float) and one.dtype is not torch.float64 else repr(value)


def _side_effect(eager: Outcome, row: Row) -> str:
    if row.symptom == "log":
        return f"the program logs {describe(eager.log)[:300] or 'nothing'}"
    if row.symptom == "state-version":
        rises = ", ".join(f"`{item.name}` by {item.changes}" for item in eager.state if item.changes)
        return f"the version counters rise: {rises}"
    if row.symptom == "random-state":
        return f"the run {'moves' if eager.drew else 'does not move'} the state of torch's random numbers"
    if row.symptom == "values-observed":
        return f"the program shows {', '.join(item.name for item in eager.values) or 'no values'}"
    if row.symptom == "invariant":
        return f"these hold: {', '.join(item.name for item in eager.invariants if item.holds)}"
    return ""
