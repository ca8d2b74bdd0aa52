"""Undeclared mutations: operators that write running statistics which their schemas declare as read-only.

In: a call, as functionalisation receives it. Out: an equivalent call whose schema declares the write; or a
refusal if there is none.

Functionalisation relies on schemas. A call with an undeclared write would stay in the graph unchanged, and
would write again each time the graph, a part of it or the function is re-run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.errors import not_representable
from retrograd.facts import fact
from retrograd.graph.fx import schema_of


def declaring_its_writes(operator: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...], int] | None:
    """The call to make instead: its operator, its arguments, and how many of its first results are those of
    the other call. None if the call writes only what its schema declares.

    Raises:
        Refusal: the call has an undeclared write, and no operator declares the same write.
    """
    places = fact("writes", operator)
    if places is None:
        return None
    given = [place for place in places if args[place] is not None]
    condition, instead = fact("writes_if", operator), fact("declared_by", operator)
    if not given or (condition is not None and not args[condition]):
        return None
    if instead is None or len(given) < len(places):
        raise not_representable(f"it calls {operator}, which writes running statistics without saying so")
    args = (*args[:condition], *args[condition + 1 :])  # the replacement always writes: no flag
    return getattr(torch.ops.aten, instead).default, args, len(schema_of(operator).returns)
