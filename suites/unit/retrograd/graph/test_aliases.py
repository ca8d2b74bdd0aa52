"""Whose memory the values of a graph share."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.graph.aliases import memory_owners


def test_owners_of_views_lists_and_results() -> None:
    def values(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, mean, _ = torch.native_layer_norm(x, [3], None, None, 1e-5)
        product = torch.ops.aten._unsafe_view(x @ y, [9])
        written = torch.ops.aten.copy_(y.clone(), x)
        return x.view(-1), x.split(2)[1], x.unbind()[0], normed, mean, product, written

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    graph = make_fx(values, tracing_mode="fake")(x, y).graph
    owners = memory_owners(graph.nodes)
    found = [[owner.name for owner in owners[value]] for value in graph.output_node().args[0]]
    *views, normed, mean, product, written = found
    assert views == [["x_1"]] * 3
    assert normed != mean
    assert not {*normed, *mean} & {"x_1", "native_layer_norm"}
    assert product == ["mm"]
    assert written == ["clone"]
