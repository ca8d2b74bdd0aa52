"""Where the values of one call of a compiled function stand.

In: nothing. Out: pickers: functions that take values by their places in a list, decided before the first call.
A call keeps all its values in one list, its *frame*; who needs some of them takes them with one picker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["Picker", "picker", "rebuilder"]

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


def picker(places: Sequence[int]) -> Picker:
    """A function that takes the values at `places` out of a frame."""
    if not places:
        return lambda frame: ()
    if len(places) == 1:
        place = places[0]
        return lambda frame: (frame[place],)
    return itemgetter(*places)


def rebuilder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """What ``tree_unflatten`` does for `spec`; without walking it if it is a tensor, or a flat tuple or list."""
    if spec.is_leaf():
        return lambda values: values[0]
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return spec.type  # type: ignore[no-any-return]
    return lambda values: pytree.tree_unflatten(values, spec)
