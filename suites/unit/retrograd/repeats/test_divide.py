"""Where a sequence of calls repeats itself, and where a repeat is cut into copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from retrograd.repeats.divide import Repeat, boundary_costs, find_repeats


def found(text: Sequence[object], least: int = 6, costs: list[float | None] | None = None) -> list[Repeat]:
    return find_repeats(text, [1.0] * (len(text) + 1) if costs is None else costs, least)


def test_layers_between_a_head_and_a_tail() -> None:
    assert found("xy" + "abcdef" * 4 + "z") == [Repeat(2, 6, 4)]


def test_nothing_repeats() -> None:
    assert found("abcdefghijklmnopqrstuvwxyz") == []
    assert found("") == []
    assert found("ab") == []


def test_two_kinds_of_layers() -> None:
    encoder, decoder = "abcdef" * 3, "ghijklmn" * 3
    assert found(encoder + "--" + decoder) == [Repeat(0, 6, 3), Repeat(20, 8, 3)]


def test_short_layers_are_taken_several_at_a_time() -> None:
    assert found("abc" * 12, least=8) == [Repeat(0, 9, 4)]


def test_a_copy_alone_is_no_repeat() -> None:
    assert found("abc" * 5, least=8) == []


def test_a_repeat_has_as_many_copies_as_are_asked_for() -> None:
    text = "abcdef" * 3 + "--" + "ghijklmn" * 5
    assert find_repeats(text, [1.0] * (len(text) + 1), 6, copies=4) == [Repeat(20, 8, 5)]


def test_one_call_again_and_again() -> None:
    assert found("a" * 40, least=8) == [Repeat(0, 8, 5)]


def test_the_longest_saving_is_taken_first() -> None:
    """Inner repeats, here of two calls, do not hide the layers that hold them."""
    assert found(("ab" * 4 + "cd") * 5, least=4) == [Repeat(0, 10, 5)]


def test_cuts_are_made_where_they_are_cheap() -> None:
    text = "abcdef" * 4
    costs: list[float | None] = [3.0] * (len(text) + 1)
    for i in range(2, len(costs), 6):
        costs[i] = 1.0
    assert found(text, costs=costs) == [Repeat(2, 6, 3)]


def test_cuts_are_not_made_where_they_cannot() -> None:
    text = "abcdef" * 4
    costs: list[float | None] = [None] * (len(text) + 1)
    assert found(text, costs=costs) == []
    for i in range(5, len(costs), 6):
        costs[i] = 9.0
    assert found(text, costs=costs) == [Repeat(5, 6, 3)]


@pytest.mark.parametrize("layers", [50, 400])
def test_every_layer_of_a_deep_model_is_found(layers: int) -> None:
    layer = [f"call {i % 17} {i // 9}" for i in range(60)]
    assert found(["first", *layer * layers, "last"], least=30) == [Repeat(1, 60, layers)]


def test_what_a_cut_costs_is_what_crosses_it() -> None:
    # call 0 makes a value for 2 and 3; 1 one for 2; 2 one that cannot be handed over, for 3.
    assert boundary_costs(4, [(0, 3, 2.0), (1, 2, 1.0), (2, 3, None)]) == [0.0, 2.0, 3.0, None, 0.0]
