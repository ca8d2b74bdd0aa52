"""Seeds of a graph that is compiled in parts: drawn by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config, inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd._torch.inductor import with_seeds_at_once
from retrograd.backends.registry import AtenBackend
from retrograd.repeats.compile import divide

LAYERS = 6


def dropping(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Layers that drop elements out."""
    masks = []
    for weight in weights:
        mask = torch.rand(x.shape, dtype=torch.float32, device=x.device) > 0.5
        x = torch.tanh(x @ weight).relu() * mask * 2.0
        masks.append(mask)
    return x, *masks


def traced(fn: Callable[..., Any], *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value) for value in inputs]
    gm = make_fx(fn, tracing_mode="fake")(*inputs)
    with mode:
        for node in gm.graph.nodes:
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    for node, fake in zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    return gm, fakes


def count(gm: fx.GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


INPUTS = [torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(LAYERS))]


def test_one_call_draws_the_seeds_and_layers_are_still_alike() -> None:
    gm, fakes = traced(dropping, *INPUTS)
    made = with_seeds_at_once(gm, fakes)
    assert [count(one, torch.ops.aten.rand.default) for one in (gm, made)] == [LAYERS, 0]
    parts = [gm for gm, _, _ in divide(made, fakes, 4, None).graphs.values()]
    assert len(parts) < LAYERS
    assert sum(count(part, inductor_prims.seeds) for part in parts) == 1


def test_numbers_are_drawn_anew_by_every_call_and_repeat_with_the_seed() -> None:
    gm, fakes = traced(dropping, *INPUTS)
    run = AtenBackend().compile(with_seeds_at_once(gm, fakes), fakes)
    torch.manual_seed(3)
    first = run([*INPUTS])
    torch.manual_seed(3)
    again = run([*INPUTS])
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    masks = [tuple(mask.flatten().tolist()) for mask in first[1:]]
    assert len({*masks}) == LAYERS
    assert 0.2 < sum(map(sum, masks)) / (LAYERS * 32) < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_have_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.randn(3, 2, dtype=dtype), torch.rand([], dtype=dtype), x

    gm, fakes = traced(fn, torch.ones(2))
    made = with_seeds_at_once(gm, fakes)
    assert count(made, inductor_prims.random) == 2
    normal, uniform, _ = AtenBackend().compile(made, fakes)([torch.ones(2)])
    assert (normal.dtype, normal.shape, uniform.dtype, uniform.shape) == (dtype, (3, 2), dtype, ())
    values = [node.meta["val"] for node in made.graph.output_node().all_input_nodes]
    assert [value.dtype for value in values[:2]] == [dtype, dtype]


def test_a_graph_that_would_gain_nothing_is_left() -> None:
    gm, fakes = traced(lambda x: (torch.rand(3) + x,), torch.ones(3))
    assert with_seeds_at_once(gm, fakes) is gm


def test_what_inductor_leaves_to_eager_is_left() -> None:
    gm, fakes = traced(dropping, *INPUTS)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.rand.default):
        node.kwargs = {**node.kwargs, "pin_memory": True}
    assert with_seeds_at_once(gm, fakes) is gm


def test_a_graph_stays_where_inductor_does_not_make_numbers_of_seeds() -> None:
    gm, fakes = traced(dropping, *INPUTS)
    with config.patch(fallback_random=True):
        assert with_seeds_at_once(gm, fakes) is gm
