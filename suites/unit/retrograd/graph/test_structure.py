"""Captured calls as values: equal where they compute the same, and different wherever they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from retrograd.graph.structure import structure_of, token_of
from retrograd.live.calls.gradients import NodeFunction, OutputCheck


def call(*args: Any) -> Any:
    """Stands for what a node computes."""


def structure(build: Callable[[fx.Node, fx.Node], tuple[Any, ...]], target: Any = call) -> Any:
    """Of one call whose arguments are built from two values."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(target, build(x, y))
    return structure_of([node], [x, y], [node])


def token(build: Callable[[fx.Node, fx.Node], tuple[Any, ...]], target: Any = call) -> Any:
    graph = fx.Graph()
    return token_of(graph.call_function(target, build(graph.placeholder("x"), graph.placeholder("y"))))


class Plain:
    """A value that is equal to itself only."""


ONE = Plain()

ARGUMENTS: list[Callable[[fx.Node, fx.Node], tuple[Any, ...]]] = [
    lambda x, y: (),
    lambda x, y: (x, y),
    lambda x, y: (y, x),
    lambda x, y: ([x, None], y),
    lambda x, y: ([x], None, y),
    lambda x, y: (0, 1),
    lambda x, y: (False, True),
    lambda x, y: ("0", "1"),
    lambda x, y: ("b'0'", "b'1'"),
    lambda x, y: (b"0", b"1"),
    lambda x, y: (b"number", 1),
    lambda x, y: (0.0, 1),
    lambda x, y: (-0.0, 1),
    lambda x, y: (1.0, 1),
    lambda x, y: (float("nan"), 1),
    lambda x, y: (torch.float32, 1),
    lambda x, y: (torch.float64, 1),
    lambda x, y: (ONE, 1),
    lambda x, y: (1, ONE),
]


def test_structures_are_equal_for_equal_arguments_only() -> None:
    once, again = [structure(build) for build in ARGUMENTS], [structure(build) for build in ARGUMENTS]
    assert once == again
    assert len(set(once)) == len(ARGUMENTS)


def test_numbers_are_told_apart_from_each_other_and_from_all_else() -> None:
    values = (0.5, -0.0, 0.0, float("inf"), 1, True, None, b"number", "0.5")
    assert len({structure(lambda x, y, value=value: (x, value)) for value in values}) == len(values)


def test_tokens_do_not_tell_where_values_come_from() -> None:
    assert token(lambda x, y: (x, [y, 2])) == token(lambda x, y: (y, [y, 2]))
    assert token(lambda x, y: (x, 1.5)) != token(lambda x, y: (x, 2.5))
    assert token(lambda x, y: (x, 1)) != token(lambda x, y: (x, 2))
    assert token(lambda x, y: (x, None)) != token(lambda x, y: (x, y))


def test_what_cannot_be_compared_has_no_structure() -> None:
    class Unhashable(Plain):
        __hash__ = None  # type: ignore[assignment]

    assert structure(lambda x, y: (x, Unhashable())) is None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (NodeFunction("SinBackward0", call), NodeFunction("SinBackward0", call), True),
        (NodeFunction("SinBackward0", call), NodeFunction("CosBackward0", call), False),
        (NodeFunction("SplitBackward0", call), NodeFunction("SplitBackward0", call), True),
        (OutputCheck(call, "SinBackward0"), OutputCheck(call, "SinBackward0"), True),
        (OutputCheck(call, "SinBackward0"), OutputCheck(call, "CosBackward0"), False),
        (NodeFunction("SinBackward0", call), NodeFunction("SinBackward0", max), False),
    ],
)
def test_targets_are_told_apart_by_what_they_call_and_say(one: Any, other: Any, equal: bool) -> None:
    assert (structure(lambda x, y: (x,), one) == structure(lambda x, y: (x,), other)) is equal


def test_numbers_count_in_the_order_of_the_calls() -> None:
    def of(*numbers: float) -> Any:
        graph = fx.Graph()
        x = graph.placeholder("x")
        first = graph.call_function(call, ([x, numbers[0]], (numbers[1], [numbers[2]])))
        second = graph.call_function(call, (first, numbers[3], 4))
        return structure_of([first, second], [x], [second])

    assert of(0.5, 1.5, 2.5, 3.5) == of(0.5, 1.5, 2.5, 3.5) != of(0.5, 1.5, 3.5, 2.5)
