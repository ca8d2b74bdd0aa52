"""Passes over joint graphs: the same numbers, no new aliases, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import Parameter

from retrograd.errors import PassError
from retrograd.graph.joint import JointSignature
from retrograd.passes.aten import (
    NUMERICS_PRESERVING,
    pass_named,
    remove_dead_code,
    run_passes,
)
from unit.retrograd.aot.joint_graphs import Joint, interpreted, joint, text

aten = torch.ops.aten


def leaf(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


def parameter(*sizes: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(*sizes, dtype=dtype))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Without the None of gradients that are none."""
    return [value for value in values if value is not None]


def sharing(values: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Which outputs share memory with one another."""
    known = list(enumerate(tensors(values)))
    return [(n, m) for n, one in known for m, other in known if n < m and shares_memory(one, other)]


def changed_by_writing(graph: Joint, gm: fx.GraphModule) -> list[bool]:
    """For each output, whether writing to those of a first call changes what a second call gives."""
    first = [value.clone() for value in tensors(interpreted(gm, graph.inputs))]
    for value in tensors(interpreted(gm, graph.inputs)):
        value.detach().fill_(7)
    second = tensors(interpreted(gm, graph.inputs))
    return [not torch.equal(one, other) for one, other in zip(first, second, strict=True)]


def attention(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [(x @ one).view(2, 4, 2, 4).transpose(1, 2) for one in (w, v, w)]
    mask = torch.ones(4, 4, dtype=torch.bool).tril().logical_not()
    scores = (heads[0] @ heads[1].transpose(-1, -2)) * (4**-0.5)
    weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
    return (weights @ heads[2]).transpose(1, 2).reshape(2, 4, 8)


def dropped(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, _ = torch.native_dropout(x @ w, 0.5, True)
    z, _ = torch.native_dropout(x @ w, 0.5, True)
    return y + z, (x @ w @ v).relu(), (y - z).t() if y.dim() == 2 else y - z


def aliasing(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    ones = torch.ones(3) * 2
    return (
        y,
        y.view(-1),
        (x * 2),
        x.view(-1),
        x.view(2, -1).view(-1),
        ones,
        ones.view(3, 1),
        torch.ones(3) * 2,
    )


def copying(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    positions = torch.arange(3) * 2
    zeros = torch.zeros(2) * (torch.arange(2) * -2 + 1)  # 0.0 and -0.0
    return x.transpose(0, 1).reshape(-1), x.transpose(0, 1).reshape(-1), positions, x[0, 0, :2].abs() / zeros


PROGRAMS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "dropped": dropped,
    "aliasing": aliasing,
    "copying": copying,
    "sums": lambda x, w, v: (x @ w).sum((0, 1)) + (x @ v).sum((0, 1)) * w.t().t().sum(0),
    "index": lambda x, w, v: x[:, [0, 1, 1]] @ (w + v) + torch.arange(8) * torch.eye(8).sum(0),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_passes_preserve_bits_layouts_and_aliases(name: str, dynamic: bool) -> None:
    graph = joint(PROGRAMS[name], leaf(2, 4, 8), parameter(8, 8), parameter(8, 8), dynamic=dynamic)
    expected = graph.run(seed=3)
    gm, reports = run_passes(graph.gm, graph.inputs, NUMERICS_PRESERVING)
    found = interpreted(gm, graph.inputs, seed=3)
    for one, other in zip(found, expected, strict=True):
        if one is not None or other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, check_stride=True)
    assert sharing(found) == sharing(expected)
    assert not any(changed_by_writing(graph, gm))
    assert [report.name for report in reports] == [one.__name__ for one in NUMERICS_PRESERVING]
    again, _ = run_passes(gm, graph.inputs, NUMERICS_PRESERVING)
    assert text(again) == text(gm)


def test_dead_calls_of_higher_order_go_only_if_their_graphs_do_nothing_else() -> None:
    def pure(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def random(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    for branch, is_kept in ((pure, False), (random, True)):
        graph = joint(lambda x: x * 2, leaf(3))
        inner = torch.fx.experimental.proxy_tensor.make_fx(branch)(torch.randn(3))
        graph.gm.inner = inner
        output = graph.gm.graph.output_node()
        x = graph.gm.graph.find_nodes(op="placeholder")[0]
        with graph.gm.graph.inserting_before(output):
            body = graph.gm.graph.get_attr("inner")
            graph.gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "inner", x))
        remove_dead_code(graph.gm)
        found = [node.target for node in graph.gm.graph.nodes]
        assert (torch.ops.higher_order.invoke_subgraph in found) is is_kept
        assert hasattr(graph.gm, "inner") is is_kept


def reverse_gradients(gm: fx.GraphModule) -> None:
    """Put the gradients of a joint graph with one output into the opposite order."""
    signature: JointSignature = gm.meta["signature"]
    (outputs,) = gm.graph.output_node().args
    gm.graph.output_node().args = ((outputs[0], *reversed(outputs[1:])),)
    roles = (signature.outputs[0], *reversed(signature.outputs[1:]))
    gm.meta["signature"] = replace(signature, outputs=roles)


def test_a_graph_without_roles_is_refused() -> None:
    gm = joint(lambda x: x * 2, leaf(3)).gm
    del gm.meta["signature"]
    with pytest.raises(PassError, match="which says what the graph's inputs and outputs mean"):
        run_passes(gm, (), [remove_dead_code])


def test_passes_are_found_by_name() -> None:
    assert all(pass_named(one.__name__) is one for one in NUMERICS_PRESERVING)
    with pytest.raises(ValueError, match="unknown pass 'fuse'"):
        pass_named("fuse")
