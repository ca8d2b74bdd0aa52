"""Operators that write to tensors which their schemas say they only read: running statistics.

In: a call, as functionalisation gets it. Out: one that does the same, whose schema declares what it writes;
or a refusal if there is none.

Functionalisation goes by schemas. A call with an undeclared write would stay in the graph as it is, and write
each time that the graph, a part of it or the function is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from retrograd.errors import not_representable
from retrograd.facts import fact
from retrograd.graph.fx import schema_of


class Instead(NamedTuple):
    """A call in place of another; the first `results` of what it gives are those of the other."""

    operator: Any
    args: tuple[Any, ...]
    results: int


def declaring_its_writes(operator: Any, args: Sequence[Any]) -> Instead | None:
    """What to call instead; None if the call writes nothing that its schema does not declare.

    Raises:
        Refusal: it does, and no operator does the same and declares it.
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
    args = (*args[:condition], *args[condition + 1 :])  # what writes does not ask whether it may
    return Instead(getattr(torch.ops.aten, instead).default, args, len(schema_of(operator).returns))
