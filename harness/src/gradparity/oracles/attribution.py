"""Attribution: is a divergence the subject's, or that of the stock forward which it was given?

In: Evidence against eager, and the outcome of stock torch with the same compiled forward and a plain
backward. Out: the first finding that stock does not share, or None when every one is stock's own. Each
observation is judged alone: it may be as in eager, or as stock shows it, so that a subject may put right
what stock does wrong, and answers for all that neither shows. Where stock's own bits differ from eager's,
the subject's need only be as near to eager as those of a subject that promises no bits.

A subject that is sold as a whole, its front end being stock's, answers for what nobody would notice: wrong
values, kinds and layouts, side effects, and errors that do not come. Stock's own are then an exception, the
order of hooks and what they are given, and the last bits.

Of stock with the same code generator, only rounding is excused. Values that it has in common with the subject
need a float64 reference, to which both are near, or are near to eager's: both may draw other numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import Any

from gradparity.oracles.distance import same_bits
from gradparity.oracles.evidence import Evidence, Pair, sequence
from gradparity.oracles.exceptions import exceptions
from gradparity.oracles.grad_metadata import leaf_metadata
from gradparity.oracles.hook_order import Step, hook_order
from gradparity.oracles.invariants import invariants
from gradparity.oracles.side_effects import side_effects
from gradparity.oracles.values import leaf_values, may_be_rounding
from gradparity.outcome import HookEvent, Outcome, Payload, TensorRecord
from gradparity.verdict import Finding, Verdict

CALLED, NOT_CALLED = "called", "not called"


def not_stocks_own(
    evidence: Evidence, stock: Outcome, answers_for_silent: bool = False, only_rounds: bool = False
) -> Finding | None:
    """The first finding of this evidence that stock does not share, or for which the subject answers
    nevertheless: because it is silent, or, with `only_rounds`, because rounding does not explain it.
    """
    mine = replace(evidence, notes=[])
    theirs = replace(mine, eager=stock, notes=[])
    if (ended_early := exceptions(mine)) is not None:
        is_silent = answers_for_silent and mine.subject.raised is None
        if is_silent or exceptions(theirs) is not None:
            return ended_early
    if (found := hook_order(mine)) is not None and not _order_is_explained(mine, stock):
        return found
    shown = mine if answers_for_silent else theirs
    found = _values_shown(mine, shown) or _leaves(
        _aligned(mine), _aligned(theirs), answers_for_silent, only_rounds
    )
    if found is not None and ended_early is not None and found.symptom.endswith("-none"):
        return None
    return found or _beside(mine, shown)


def _beside(mine: Evidence, theirs: Evidence) -> Finding | None:
    """A finding besides gradients and values that is one against stock, too."""
    for oracle in (invariants, side_effects):
        if (found := oracle(mine)) is not None and oracle(theirs) is not None:
            return found
    return None


def _order_is_explained(evidence: Evidence, stock: Outcome) -> bool:
    """The order of stock, or as many calls as in stock in the order of eager."""
    eager, subject = sequence(evidence.eager.events), sequence(evidence.subject.events)
    theirs = sequence(stock.events)
    if subject == theirs:
        return True
    if Counter(subject) != Counter(theirs):
        return False
    extra = set(Counter(theirs) - Counter(eager))
    return _is_subsequence([step for step in subject if step not in extra], eager)


def _is_subsequence(short: list[Step], long: list[Step]) -> bool:
    rest = iter(long)
    return all(step in rest for step in short)


def _values_shown(mine: Evidence, theirs: Evidence) -> Finding | None:
    """A finding if the program showed other values than it does both in eager and in stock."""
    if mine.subject.raised is not None:
        return None
    shown = [value.name for value in mine.subject.values]
    others = [[value.name for value in found.eager.values] for found in (mine, theirs)]
    if shown in others:
        return None
    return Finding(Verdict.DIVERGE, "values-observed", f"eager shows {others[0]}, subject {shown}")


def _leaves(mine: Evidence, theirs: Evidence, answers_for_silent: bool, only_rounds: bool) -> Finding | None:
    others = {pair.label: pair for pair in theirs.pairs}
    loose = replace(mine, bitwise=False, notes=[])
    for pair in mine.pairs:
        found = leaf_metadata(pair, mine) or leaf_values(pair, mine)
        if found is None:
            continue
        other = others.get(pair.label)
        if other is None and pair.subject is not None:
            return found
        if other is None:
            continue  # a leaf that neither stock nor the subject came to register
        is_near = _stock_rounds(pair, other) and not (leaf_metadata(pair, loose) or leaf_values(pair, loose))
        is_shared = (leaf_metadata(other, theirs) or leaf_values(other, theirs)) is None
        is_excused = may_be_rounding(pair, mine) if only_rounds else not answers_for_silent
        if not is_near and not (is_shared and (is_excused or (pair.role == "event" and not only_rounds))):
            return found
    return None


def _stock_rounds(pair: Pair, other: Pair) -> bool:
    """Whether stock's own bits differ from eager's in this leaf."""
    eager, stock = pair.eager, other.eager
    if not isinstance(eager, TensorRecord) or not isinstance(stock, TensorRecord):
        return False
    return eager.shape != stock.shape or not same_bits(eager, stock)


def _aligned(evidence: Evidence) -> Evidence:
    """The same evidence with eager's events in the order of the subject's, the n-th call of a site beside the
    n-th. Every payload says in its last place whether there was a call.
    """
    waiting: defaultdict[Step, deque[HookEvent]] = defaultdict(deque)
    for event in evidence.eager.events:
        waiting[event.site, event.kind].append(event)
    ours, theirs = [], []
    for event in evidence.subject.events:
        same = waiting[event.site, event.kind]
        payload = (*same.popleft().payload, CALLED) if same else (*_nones(event.payload), NOT_CALLED)
        ours.append(replace(event, payload=payload))
        theirs.append(replace(event, payload=(*event.payload, CALLED)))
    eager, subject = replace(evidence.eager, events=tuple(ours)), evidence.subject
    return replace(evidence, eager=eager, subject=replace(subject, events=tuple(theirs)), notes=[])


def _nones(payload: tuple[Payload, ...]) -> tuple[Any, ...]:
    """The same tuples, with None in place of what is in them."""
    return tuple(_nones(each) if isinstance(each, tuple) else None for each in payload)
