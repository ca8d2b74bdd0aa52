"""Where the values of one call of a compiled function stand.

In: a partition. Out: `Layout`: places in the call's one list of values, its *frame*; and pickers, functions
that take values out of it by places which are decided before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from retrograd._torch import pytree
from retrograd._torch.subclass import PLAIN
from retrograd.graph.partition import Partition, Saved, SavedKind

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Layout:
    """Where in a frame each kind of value begins. First come the primals.

    Attributes:
        is_plain: whether there are no wrapper subclasses; then primals are their own parts.
        is_apart: whether values stand apart from the graph's results: if there are wrapper subclasses, or if
            values are written into primals, which they are from then on.
        parts: what the graph is given.
        results: what it gives.
        values: forward values of the joint graph; in the course of the call they get their history.
        end: behind all of them.
        plain_values: by place among the results, the value that it is.
    """

    is_plain: bool
    is_apart: bool
    parts: int
    results: int
    values: int
    end: int
    plain_values: dict[int, int]

    @staticmethod
    def of(partition: Partition) -> Layout:
        """The layout of calls of `partition`."""
        joint = partition.joint
        is_plain = all(primal.wrapping is PLAIN for primal in joint.primals) and all(
            value.wrapping is PLAIN for value in joint.values
        )
        forward = joint.signature.outputs[: joint.signature.forward_count]
        kept = sum(saved.kind is SavedKind.INTERMEDIATE for saved in partition.saved)
        parts = 0 if is_plain else len(joint.primals)
        results = parts + sum(primal.wrapping.count for primal in joint.primals)
        is_apart = bool(joint.updates) or not is_plain
        behind = results + len(forward) + kept
        plain = {
            place: role.index  # type: ignore[union-attr]
            for place, role in enumerate(forward)
            if joint.values[role.index].wrapping is PLAIN  # type: ignore[union-attr]
        }
        values, end = (behind, behind + len(joint.values)) if is_apart else (results, behind)
        return Layout(is_plain, is_apart, parts, results, values, end, plain)

    def place_of(self, saved: Saved) -> int:
        """Where a saved value stands. One that eager saves too is saved as it is now: perhaps written into a
        primal, with its history."""
        if saved.kind is SavedKind.PRIMAL:
            return self.parts + saved.place
        if saved.by_eager and saved.place in self.plain_values:
            return self.values + self.plain_values[saved.place]
        return self.results + saved.place


def picker(places: Sequence[int]) -> Picker:
    """A function that takes the values at `places` out of a frame."""
    if not places:
        return lambda frame: ()
    if len(places) == 1:
        place = places[0]
        return lambda frame: (frame[place],)
    return itemgetter(*places)


def rebuilder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """What ``tree_unflatten`` does for `spec`, without walking one tensor, or a flat tuple or list."""
    if spec.is_leaf():
        return lambda values: values[0]
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        made: Callable[[Sequence[Any]], Any] = spec.type
        return made
    return lambda values: pytree.tree_unflatten(values, spec)
