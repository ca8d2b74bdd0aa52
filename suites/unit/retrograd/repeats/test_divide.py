"""Where a sequence of calls repeats itself, and where a repeat is cut into copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.repeats.borders import aten_border_costs, border_costs
from retrograd.repeats.divide import Repeat, cut_at, find_repeats

aten, prims = torch.ops.aten, torch.ops.prims


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
    """Call 0 makes a value for 2 and 3; 1 one for 2; 2 one that cannot be handed over, for 3."""
    graph = fx.Graph()
    calls: list[fx.Node] = []
    for reads in ((), (), (0, 1), (0, 2)):
        calls.append(graph.call_function(max, tuple(calls[i] for i in reads)))
    prices = dict(zip(calls, [2.0, 1.0, None, 0.0], strict=True))
    assert border_costs(calls, prices.__getitem__) == [0.0, 2.0, 3.0, None, 0.0]
    assert border_costs(calls, prices.__getitem__, closed=[(0, 1)]) == [0.0, None, 3.0, None, 0.0]
    assert border_costs(calls, prices.__getitem__, {calls[1]: {calls[0]}}) == [0.0, 2.0, 3.0, None, 0.0]


def costs_behind(function: Callable[..., object], *examples: torch.Tensor) -> dict[str, float | None]:
    """What a border behind each call of a traced function costs, by the call's name."""
    traced = make_fx(function, tracing_mode="fake")(*examples)
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    return dict(zip([node.name for node in calls], aten_border_costs(calls)[1:], strict=True))


def test_a_border_is_cheap_where_values_are_in_memory_in_any_case() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        residual = x.mm(w) + x
        return residual.relu().mm(w) + residual

    costs = costs_behind(layer, torch.ones(8, 8), torch.ones(8, 8))
    size = 8 * 8 * 4
    assert costs == {
        "mm": size,
        "add": 20 * size,  # the residual: no kernel makes or reads it
        "relu": 21 * size,  # it, and what the product reads
        "mm_1": 21 * size,
        "add_1": 0,
    }


def test_a_cast_for_a_product_is_in_memory() -> None:
    """It is no kernel of its own, though its operator's name begins like a convolution's."""
    half = torch.bfloat16

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gradient = x.sin()
        return torch.mm(prims.convert_element_type(gradient, half), w).to(torch.float32) + gradient

    costs = costs_behind(layer, torch.ones(8, 8), torch.ones(8, 8, dtype=half))
    size = 8 * 8 * 4
    assert costs["sin"] == 20 * size
    assert costs["convert_element_type"] == 20 * size + size // 2


def test_views_cost_what_they_show() -> None:
    costs = costs_behind(lambda x: x.sin().view(4, 16).t().cos(), torch.ones(8, 8))
    assert costs == {"sin": 20 * 256, "view": 20 * 256, "t": 20 * 256, "cos": 0}


def test_results_of_one_kernel_are_in_memory() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        values, places = torch.topk(x, 2)
        return values.sin() + places

    costs = costs_behind(both, torch.ones(8, 8))
    assert costs["topk"] is None
    assert costs["getitem_1"] == 8 * 2 * 4 + 8 * 2 * 8


def test_a_cut_leaves_the_elements_of_nested_tuples_with_their_call() -> None:
    """`run_and_save_rng_state` of a call with several results makes a state and a tuple."""

    def drop(x: torch.Tensor) -> torch.Tensor:
        state, (out, mask) = run_and_save_rng_state(aten.native_dropout.default, x, 0.5, True)
        return ((x + 1) * out * mask * state.numel(),)

    graph = make_fx(drop, tracing_mode="fake")(torch.ones(4, 8)).graph
    (drawn,) = graph.find_nodes(op="call_function", target=run_and_save_rng_state)
    parts = cut_at(graph, None, {drawn})
    assert drawn in parts[0].calls
    assert all(isinstance(node.meta["val"], torch.Tensor) for part in parts for node in part.outputs)
