"""Captured calls as values that can be compared: what two captures have in common, and where they differ.

In: FX nodes of captured calls. Out: hashable structures, and the first difference between two backwards in
words. The engine bakes numbers that are no tensors (an exponent, a slope, a smoothing) into its cache key, so
a program in which one changes is captured anew at each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import fx

from retrograd.graph.backward_graph import BackwardGraph
from retrograd.live.calls.node_function import NodeFunction

__all__ = ["family_of", "first_difference", "numbers_of", "structure_and_numbers", "structure_of", "token_of"]

#: stands for a floating point number in a structure without its numbers.
_NUMBER = "number"


def structure_of(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Hashable | None:
    """Equal for two runs of calls that compute the same from inputs in the same places; None if nobody can
    tell."""
    places = {node: i for i, node in enumerate((*inputs, *nodes))}
    calls = tuple((_target(node), _encoded(node.args, places)) for node in nodes)
    structure = calls, tuple(places[node] for node in outputs)
    return structure if _is_hashable(structure) else None


def family_of(structure: Any) -> Hashable:
    """A structure without its floating point numbers."""
    calls, outputs = structure
    return tuple((target, _without_numbers(arguments)) for target, arguments in calls), outputs


def numbers_of(nodes: Sequence[fx.Node]) -> tuple[float, ...]:
    """The floating point numbers in a run of calls."""
    return tuple(number for node in nodes for number in _numbers(node.args))


def token_of(node: fx.Node) -> Hashable:
    """Equal for two calls that compute the same but for floating point numbers, wherever their arguments come
    from; the node itself for one that nobody can compare."""
    token = _target(node), _without_numbers(_encoded(node.args, _ANYWHERE))
    return token if _is_hashable(token) else node


def structure_and_numbers(
    backward: BackwardGraph,
) -> tuple[Hashable | None, dict[fx.Node, tuple[float, ...]]]:
    """The structure of a backward without its floating point numbers, and the numbers of each call."""
    places = {node: i for i, node in enumerate(backward.graph.nodes)}
    numbers = {node: tuple(_numbers(node.args)) for node, _ in backward.calls()}
    calls = tuple((_target(node), _without_numbers(_encoded(node.args, places))) for node in numbers)
    return (calls if _is_hashable(calls) else None), numbers


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


class _Anywhere(dict[fx.Node, int]):
    """Takes no notice of where a value comes from."""

    def __missing__(self, node: fx.Node) -> int:
        return 0


_ANYWHERE = _Anywhere()


def _target(node: fx.Node) -> Any:
    target = node.target
    return (target.fn, *target.names) if isinstance(target, NodeFunction) else target


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _encoded(argument: Any, places: dict[fx.Node, int]) -> Any:
    if isinstance(argument, fx.Node):
        return fx.Node, places[argument]
    if isinstance(argument, (list, tuple)):
        return list, tuple(_encoded(item, places) for item in argument)
    # repr tells 0.0 from -0.0, and nan equals itself; True is not 1.
    return type(argument), repr(argument) if isinstance(argument, float) else argument


def _without_numbers(encoded: Any) -> Any:
    kind, value = encoded
    if kind is list:
        return kind, tuple(map(_without_numbers, value))
    return (_NUMBER, None) if kind is float else encoded


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


def _numbers(argument: Any) -> Iterator[float]:
    if isinstance(argument, float):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _numbers(item)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
