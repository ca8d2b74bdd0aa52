"""What equal segments share, of one plan or of captures of almost equal structure: nothing is compiled twice.

In: the segments of a new plan. Out: the code of equal segments, of this plan and of others; the runners of an
earlier plan for equal segments in the same place; and the calls whose floating point numbers change from
capture to capture. Each of these calls is a segment of its own and is interpreted, so that all other segments
stay equal: after two captures nothing is compiled for a third value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import fx

from retrograd.graph.backward_graph import BackwardGraph
from retrograd.graph.hook_kind import CallKind
from retrograd.graph.structure import structure_and_numbers
from retrograd.live.lower.lowered import Lowerings
from retrograd.live.lower.runner import BoxedRunner
from retrograd.process import ForkSafeLock, forgotten_by_reset
from retrograd.repeats.lift_scalars import Family

T = TypeVar("T")

#: how many structures and runners are remembered, so that a long process does not grow without end.
KEPT = 512


class Recent(Generic[T]):
    """A mapping of the entries used last; ``reset`` empties it."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = ForkSafeLock()
        forgotten_by_reset(self.clear)

    def get(self, key: Hashable, make: Callable[[], T]) -> tuple[T, bool]:
        """The entry, and whether it was made just now."""
        with self._lock:
            is_new = key not in self._entries
            if is_new:
                self._entries[key] = make()
                while len(self._entries) > self._kept:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key], is_new

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


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


_numbers: Recent[_Numbers] = Recent(KEPT)

#: runners of segments by settings, place and structure.
runners: Recent[BoxedRunner] = Recent(KEPT)

#: segments that differ only in their numbers, by settings and structure without the numbers.
families: Recent[Family] = Recent(KEPT)

#: the code of segments by settings and structure.
lowerings: Recent[Lowerings] = Recent(KEPT)


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
