"""Values that can be compared: arguments that are not tensors, and captured calls.

In: a leaf of the arguments. Out: something hashable, equal for two leaves that a capture cannot tell apart:
by value where possible, else by identity.

In: FX nodes of captured calls. Out: hashable structures, and the first difference between two backwards in
words. The engine's cache key contains numbers that are no tensors (an exponent, a slope, a smoothing), so a
program in which one changes is captured anew at each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from retrograd.graph.backward_graph import BackwardGraph, call_name

#: types whose values are compared, rather than their identities.
PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice}
)

#: for these, ``==`` says that 0.0 is -0.0, and that nan is not nan.
_FLOATING = (float, complex)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal only to itself. It is kept alive, so that no other object gets its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: Any) -> Hashable:
    """Equal for two values that are the same to a program that only reads them."""
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
    """Whether two values are the same to a program that only reads them: of the same types all the way down
    (2, 2.0 and True are three values), tensors the very same; other objects say so by ``==``."""
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


#: what is written for a floating point or complex number, and for what only Python's ``==`` can compare.
_NUMBER, _OTHER = b"number", b"other"

#: types whose values have a text of their own. Bytes are not among them: they stand for what is left out.
_TEXTS = frozenset({int, bool, str, type(None)})


def structure_of(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Hashable | None:
    """Equal for two runs of calls that compute the same from inputs in the same places; None if that cannot
    be told. Numbers are texts in it, which tell 0.0 from -0.0, and in which nan equals itself."""
    places = places_of((*inputs, *nodes))
    numbers: list[str] = []
    calls = tuple([(_target(node), written(node, places, numbers)) for node in nodes])
    structure = calls, tuple([places[node] for node in outputs]), tuple(numbers)
    return structure if _is_hashable(structure) else None


def token_of(node: fx.Node, places: Mapping[fx.Node, bytes] | None = None) -> Hashable:
    """Equal for two calls that compute the same of arguments with the same `places` (by default, wherever
    they come from); the node itself for a call that cannot be compared."""
    numbers: list[str] = []
    token = _target(node), written(node, _ANYWHERE if places is None else places, numbers), tuple(numbers)
    return token if _is_hashable(token) else node


def structure_and_numbers(backward: BackwardGraph) -> tuple[Hashable | None, dict[fx.Node, tuple[str, ...]]]:
    """The structure of a backward without its floating point numbers, and the numbers of each call."""
    places = places_of(backward.graph.nodes)
    numbers: dict[fx.Node, tuple[str, ...]] = {}
    calls = []
    for node, _ in backward.calls():
        own: list[str] = []
        calls.append((_target(node), written(node, places, own)))
        numbers[node] = tuple(own)
    return (tuple(calls) if _is_hashable(tuple(calls)) else None), numbers


def first_difference(before: BackwardGraph, now: BackwardGraph) -> str:
    """In which call two backwards differ first, with the two values."""
    sides = [[node for node, _ in backward.calls()] for backward in (before, now)]
    places = [places_of(backward.graph.nodes) for backward in (before, now)]
    for number, (old, new) in enumerate(zip(*sides, strict=False)):
        if _target(old) != _target(new):
            return f"call {number} was {call_name(old)}, now {call_name(new)}"
        for a, b in zip(_leaves(old, places[0]), _leaves(new, places[1]), strict=False):
            if a != b:
                return f"{call_name(new)} (call {number}) had {a[1]}, now {b[1]}"
    return f"{len(sides[0])} calls, now {len(sides[1])}"


def places_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, bytes]:
    """A short name for each node, which no other argument has when it is written down."""
    return {node: b"%d" % i for i, node in enumerate(nodes)}


class _Anywhere(dict[fx.Node, bytes]):
    """Takes no notice of where a value comes from."""

    def __missing__(self, node: fx.Node) -> bytes:
        return b"value"


_ANYWHERE = _Anywhere()


def written(node: fx.Node, places: Mapping[fx.Node, bytes], numbers: list[str]) -> Hashable:
    """The arguments of a call as a text, followed by those that cannot be told apart by one.

    A text is made and compared in C: every call of a backward is written down, and more than once.

    Args:
        node: the call. places: what to write for a node.
        numbers: is given the floating point numbers, which the text leaves out.
    """
    others: list[Any] = []

    def leaf(value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return places[value]
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
    """What a call calls, as a value: two targets with equal ``structure_key`` compute the same."""
    return getattr(node.target, "structure_key", node.target)


def _leaves(node: fx.Node, places: Mapping[fx.Node, bytes]) -> list[tuple[type, str]]:
    """The arguments of a call that are no sequences: True is not 1, and nan equals itself."""
    found: list[tuple[type, str]] = []

    def leaf(value: Any) -> None:
        is_node = isinstance(value, fx.Node)
        found.append((type(value), f"value {places[value].decode()}" if is_node else str(value)))

    map_aggregate(node.args, leaf)
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
