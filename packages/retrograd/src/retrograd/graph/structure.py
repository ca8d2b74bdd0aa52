"""Keys that compare values: non-tensor arguments, and captured calls.

In: a leaf of the arguments. Out: a hashable key, equal for two leaves that a capture cannot distinguish: by
value if possible, otherwise by identity.

In: FX nodes of captured calls. Out: hashable structures, and a description of the first difference between
two backwards. The engine's cache key contains plain numbers (an exponent, a slope, a smoothing), so a program
in which such a number changes is captured anew in every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from retrograd.graph.backward_graph import BackwardGraph, call_name

#: Types that are compared by value rather than by identity.
PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice}
)

#: Types for which ``==`` treats 0.0 and -0.0 as equal, and nan as unequal to itself.
_FLOATING = (float, complex)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal only to itself. We hold a reference, so that no other object gets its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: Any) -> Hashable:
    """A key that is equal for two values that a program which only reads them cannot distinguish."""
    kind = type(value)
    if kind in _FLOATING:
        return kind, repr(value)
    if kind is slice:
        return kind, constant_key(value.start), constant_key(value.stop), constant_key(value.step)
    if kind in PLAIN_VALUES:
        return kind, value
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind != "O":
        return kind, str(value.dtype), value.shape, value.tobytes()
    return _Same(value)


def is_same(one: Any, other: Any) -> bool:
    """True if a program that only reads the two values cannot distinguish them.

    Types must match at every level (2, 2.0 and True differ). Tensors must be the same object. Other objects
    are compared by ``==``.
    """
    if one is other or type(one) is not type(other) or isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    try:
        key = constant_key(one)
        return bool(one == other) if isinstance(key, _Same) else constant_key(other) == key
    except Exception:
        return False


#: Placeholders for a floating-point or complex number, and for a value that only Python's ``==`` can compare.
_NUMBER, _OTHER = b"number", b"other"

#: Types whose ``repr`` identifies the value. Bytes are excluded, because they serve as placeholders.
_TEXTS = frozenset({int, bool, str, type(None)})


def structure_of(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Hashable | None:
    """A key that is equal for two runs of calls that compute the same from corresponding inputs; None if
    unknown.

    Numbers are texts in it, so that 0.0 and -0.0 differ, and nan equals itself.
    """
    places = places_of((*inputs, *nodes))
    numbers: list[str] = []
    calls = tuple([(_target(node), written(node, places, numbers)) for node in nodes])
    structure = calls, tuple([places[node] for node in outputs]), tuple(numbers)
    return structure if is_hashable(structure) else None


def token_of(node: fx.Node, places: Mapping[fx.Node, bytes] | None = None) -> Hashable:
    """A key that is equal for two calls that compute the same from arguments with the same `places`.

    By default, places are ignored. For a call that cannot be compared, the key is the node itself.
    """
    numbers: list[str] = []
    token = _target(node), written(node, places, numbers), tuple(numbers)
    return token if is_hashable(token) else node


def structure_and_numbers(backward: BackwardGraph) -> tuple[Hashable | None, dict[fx.Node, tuple[str, ...]]]:
    """The structure of a backward without its floating-point numbers, and the numbers of each call."""
    places = places_of(backward.graph.nodes)
    numbers: dict[fx.Node, tuple[str, ...]] = {}
    calls = []
    for node, _ in backward.calls():
        own: list[str] = []
        calls.append((_target(node), written(node, places, own)))
        numbers[node] = tuple(own)
    return (tuple(calls) if is_hashable(tuple(calls)) else None), numbers


def first_difference(before: BackwardGraph, now: BackwardGraph) -> str:
    """The first call in which two backwards differ, as it was and as it is."""
    sides = [[f"{call_name(node)}{node.args}" for node, _ in graph.calls()] for graph in (before, now)]
    for number, (old, new) in enumerate(zip(*sides, strict=False)):
        if old != new:
            return f"call {number} was {old}, now {new}"
    return f"{len(sides[0])} calls, now {len(sides[1])}"


def places_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, bytes]:
    """A short name for each node, distinct from the text of every other argument."""
    return {node: b"%d" % i for i, node in enumerate(nodes)}


def written(node: fx.Node, places: Mapping[fx.Node, bytes] | None, numbers: list[str]) -> Hashable:
    """The arguments of a call as a text, followed by those that a text does not identify.

    Texts are made and compared in C, which matters: every call of a backward is written more than once.

    Args:
        node: the call.
        places: the name to write for a node; None to write the same for all.
        numbers: receives the floating-point numbers, which the text leaves out.
    """
    others: list[Any] = []

    def leaf(value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return b"value" if places is None else places[value]
        if kind in _FLOATING:
            numbers.append(repr(value))
            return _NUMBER
        if kind in _TEXTS:
            return value
        others.append(value)
        return _OTHER

    text = repr(map_aggregate((node.args, node.kwargs) if node.kwargs else node.args, leaf))
    return (text, *others) if others else text


def _target(node: fx.Node) -> Any:
    """The call's target as a comparable value. Two targets with the same ``structure_key`` compute the
    same."""
    return getattr(node.target, "structure_key", node.target)


def is_hashable(value: Any) -> bool:
    """Whether the value has a hash."""
    try:
        hash(value)
    except Exception:
        return False
    return True
