"""Captured calls as values that can be compared: what two captures have in common, and where they differ.

In: FX nodes of captured calls. Out: hashable structures, and the first difference between two backwards in
words. The engine bakes numbers that are no tensors (an exponent, a slope, a smoothing) into its cache key, so
a program in which one changes is captured anew at each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from retrograd.graph.backward_graph import BackwardGraph
from retrograd.live.calls.aten import Named
from retrograd.live.calls.node_function import NodeFunction

#: what is written for a floating point number, and for what only Python's ``==`` can compare.
_NUMBER, _OTHER = b"number", b"other"

#: types whose values have a text of their own. Bytes are not among them: they stand for what is left out.
_TEXTS = frozenset({int, bool, str, type(None)})


def structure_of(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Hashable | None:
    """Equal for two runs of calls that compute the same from inputs in the same places; None if nobody can
    tell."""
    places = _places((*inputs, *nodes))
    numbers: list[float] = []
    calls = tuple([(_target(node), _written(_arguments(node), places, numbers)) for node in nodes])
    family = calls, tuple([places[node] for node in outputs])
    # repr tells 0.0 from -0.0, and nan equals itself.
    return (family, tuple(map(repr, numbers))) if _is_hashable(family) else None


def family_of(structure: Any) -> Hashable:
    """A structure without its floating point numbers."""
    family, _ = structure
    return family


def numbers_of(nodes: Sequence[fx.Node]) -> tuple[float, ...]:
    """The floating point numbers in a run of calls."""
    numbers: list[float] = []

    def leaf(value: Any) -> None:
        if type(value) is float:
            numbers.append(value)

    for node in nodes:
        map_aggregate(_arguments(node), leaf)
    return tuple(numbers)


def token_of(node: fx.Node) -> Hashable:
    """Equal for two calls that compute the same but for floating point numbers, wherever their arguments come
    from; the node itself for one that nobody can compare."""
    token = _target(node), _written(_arguments(node), _ANYWHERE, [])
    return token if _is_hashable(token) else node


def structure_and_numbers(
    backward: BackwardGraph,
) -> tuple[Hashable | None, dict[fx.Node, tuple[float, ...]]]:
    """The structure of a backward without its floating point numbers, and the numbers of each call."""
    places = _places(backward.graph.nodes)
    numbers: dict[fx.Node, tuple[float, ...]] = {}
    calls = []
    for node, _ in backward.calls():
        own: list[float] = []
        calls.append((_target(node), _written(_arguments(node), places, own)))
        numbers[node] = tuple(own)
    return (tuple(calls) if _is_hashable(tuple(calls)) else None), numbers


def first_difference(before: BackwardGraph, now: BackwardGraph) -> str:
    """In which call two backwards differ first, with the two values."""
    sides = [[node for node, _ in backward.calls()] for backward in (before, now)]
    places = [{node: i for i, node in enumerate(backward.graph.nodes)} for backward in (before, now)]
    for number, (old, new) in enumerate(zip(*sides, strict=False)):
        if _target(old) != _target(new):
            return f"call {number} was {_name(old)}, now {_name(new)}"
        arguments = [_encoded(node.args, place) for node, place in zip((old, new), places, strict=True)]
        for a, b in zip(_leaves(arguments[0]), _leaves(arguments[1]), strict=False):
            if a != b:
                return f"{_name(new)} (call {number}) had {_shown(a)}, now {_shown(b)}"
    return f"{len(sides[0])} calls, now {len(sides[1])}"


def _places(nodes: Iterable[fx.Node]) -> dict[fx.Node, bytes]:
    """Something short for each node that stands for nothing else in arguments that are written down."""
    return {node: b"%d" % i for i, node in enumerate(nodes)}


class _Anywhere(dict[fx.Node, bytes]):
    """Takes no notice of where a value comes from."""

    def __missing__(self, node: fx.Node) -> bytes:
        return b"value"


_ANYWHERE = _Anywhere()


def _written(arguments: Any, places: Mapping[fx.Node, bytes], numbers: list[float]) -> Hashable:
    """The arguments of a call as a text, followed by those that cannot be told apart by one.

    A text is made and compared in C: every call of a backward is written down, and more than once.

    Args:
        arguments: of the call. places: what to write for a node.
        numbers: is given the floating point numbers, which the text leaves out.
    """
    others: list[Any] = []

    def leaf(value: Any) -> Any:
        kind = type(value)
        if kind is fx.Node:
            return places[value]
        if kind is float:
            numbers.append(value)
            return _NUMBER
        if kind in _TEXTS:
            return value
        others.append(value)
        return _OTHER

    text = repr(map_aggregate(arguments, leaf))
    return (text, *others) if others else text


def _target(node: fx.Node) -> Any:
    target = node.target
    if isinstance(target, NodeFunction):
        return target.fn, *target.names
    return (Named, *target.key) if isinstance(target, Named) and target.key is not None else target


def _arguments(node: fx.Node) -> Any:
    return (node.args, node.kwargs) if node.kwargs else node.args


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _encoded(argument: Any, places: dict[fx.Node, int]) -> Any:
    if isinstance(argument, fx.Node):
        return fx.Node, places[argument]
    if isinstance(argument, (list, tuple)):
        return list, tuple(_encoded(item, places) for item in argument)
    # repr tells 0.0 from -0.0, and nan equals itself; True is not 1.
    return type(argument), repr(argument) if isinstance(argument, float) else argument


def _leaves(encoded: Any) -> Iterator[Any]:
    kind, value = encoded
    if kind is list:
        for item in value:
            yield from _leaves(item)
    else:
        yield encoded


def _shown(leaf: Any) -> str:
    kind, value = leaf
    return f"value {value}" if kind is fx.Node else str(value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
