"""Numbers that change from capture to capture: what changes all the time is not compiled.

In: a backward that was captured before with other numbers. Out: the calls whose numbers change. Each of them
is a segment of its own and is interpreted, so that all other segments stay equal: after two captures nothing
is compiled for a third value.
"""

from __future__ import annotations

from torch import fx

from retrograd.graph.backward_graph import BackwardGraph, CallKind
from retrograd.graph.structure import structure_and_numbers
from retrograd.process import Recent


class _Numbers:
    """The numbers in the calls of one structure: what they were last, and which calls' have changed."""

    def __init__(self) -> None:
        self.last: tuple[tuple[str, ...], ...] | None = None
        self.changing: dict[int, str] = {}

    def see(self, names: list[str], now: tuple[tuple[str, ...], ...]) -> None:
        """Compare with the last capture."""
        for i, (old, new) in enumerate(zip(self.last or now, now, strict=True)):
            if old != new:
                self.changing.setdefault(i, f"{names[i]} had {', '.join(old)}, now {', '.join(new)}")
        self.last = now


#: by structure without the numbers.
_numbers: Recent[_Numbers] = Recent()


def changing_numbers(backward: BackwardGraph) -> dict[fx.Node, str]:
    """The calls whose numbers differ between captures, with the two values that differed first.

    Only calls of nodes: what a hook or a Function is given does not reach a segment.
    """
    structure, numbers = structure_and_numbers(backward)
    if structure is None or not any(numbers.values()):
        return {}
    nodes = list(numbers)
    known, _ = _numbers.get(structure, _Numbers)
    known.see([str(getattr(node.target, "__name__", node.target)) for node in nodes], tuple(numbers.values()))
    functional = {node for node, call in backward.calls() if call.kind is CallKind.NODE}
    return {nodes[i]: text for i, text in known.changing.items() if nodes[i] in functional}
