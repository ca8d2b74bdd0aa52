"""Gradients that become visible one by one, to hooks that free them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from benchmarks.allocator import allocator_peak_of
from retrograd import aot
from retrograd.aot.trace.structure import MOST_BLOCKS, divide
from retrograd.graph.eager_order import Edge, LiveGraph, LiveNode
from retrograd.graph.joint_graph import CaptureOptions

Run = Callable[[torch.Tensor], torch.Tensor]


def stack(layers: int, width: int, *, biases: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(layers) for m in (nn.Linear(width, width, bias=biases), nn.Tanh()))
    )


def freeing(model: nn.Module, events: list[Any]) -> None:
    """An optimizer in backward: notes and frees each gradient as soon as it has accumulated."""
    for name, parameter in model.named_parameters():

        def hook(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            events.append((name, parameter.grad.clone()))
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)


def noting_backward(events: list[Any]) -> Callable[..., Any]:
    """A backend that notes when a region runs."""

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            events.append("region")
            return gm(*args)

        return run

    return backend


def test_hooks_run_between_the_regions_of_a_model_and_see_eagers_bits() -> None:
    x = torch.randn(3, 5)
    eager: list[Any] = []
    model = stack(3, 5)
    freeing(model, eager)
    model(x).sum().backward()
    events: list[Any] = []
    model = stack(3, 5)
    freeing(model, events)
    compiled = aot.module(model, backend="eager", backward=noting_backward(events), strict=True)
    compiled(x).sum().backward()
    hooks = [event for event in events if event != "region"]
    assert [name for name, _ in hooks] == [name for name, _ in eager]
    for (_, got), (_, want) in zip(hooks, eager, strict=True):
        assert torch.equal(got, want)
    kinds = ["region" if event == "region" else event[0] for event in events]
    assert kinds == [
        *("region", "4.bias", "region", "4.weight"),
        *("region", "2.bias", "region", "2.weight"),
        *("region", "0.bias", "region", "0.weight"),
    ]


def test_without_such_hooks_there_is_one_region() -> None:
    events: list[Any] = []
    model = stack(3, 5)
    compiled = aot.module(model, backend="eager", backward=noting_backward(events), strict=True)
    compiled(torch.randn(3, 5)).sum().backward()
    assert events == ["region"]


def test_hooks_that_come_later_are_seen_by_the_next_call() -> None:
    events: list[Any] = []
    model = stack(2, 5, biases=False)
    compiled = aot.module(model, backend="eager", backward=noting_backward(events), strict=True)
    compiled(torch.randn(3, 5)).sum().backward()
    events.clear()
    freeing(model, events)
    compiled(torch.randn(3, 5)).sum().backward()
    assert [event if event == "region" else event[0] for event in events] == [
        *("region", "2.weight"),
        *("region", "0.weight"),
    ]


def test_second_derivatives_of_a_stepped_function() -> None:
    """Blocks run again as eager: first derivatives have eager's bits, second ones are right."""
    results = []
    for wrap in (lambda m: m, lambda m: aot.module(m, backend="eager", strict=True)):
        model = stack(2, 4)
        events: list[Any] = []
        freeing(model, events)
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        (grad,) = torch.autograd.grad(wrap(model)(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append((grad.detach(), {**dict(events), "x": x.grad}))
    (eager_grad, eager), (grad, compiled) = results
    assert torch.equal(grad, eager_grad)
    torch.testing.assert_close(compiled, eager)


def test_an_optimizer_in_backward_keeps_its_memory_advantage() -> None:
    """With 12 weights of 1 MiB, eager holds a few gradients at a time, not all of them."""
    peaks = []
    for wrap in (lambda m: m, lambda m: aot.module(m, backend="eager", strict=True)):
        model = stack(12, 512, biases=False)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        compiled: Run = wrap(model)
        x = torch.randn(2, 512)
        for _ in range(2):
            compiled(x).sum().backward()

        def step(starts: Callable[[], None], compiled: Run = compiled, x: torch.Tensor = x) -> None:
            starts()
            compiled(x).sum().backward()

        peaks.append(allocator_peak_of(step))
    eager, stepped = peaks
    assert stepped <= eager + (1 << 20)


def chain(count: int) -> LiveGraph:
    """`count` nodes in a row, each with a leaf of its own; leaves are the nodes behind them."""
    nodes = [
        LiveNode(f"n{i}", f"n{i}", count - i, (Edge(i + 1, 0) if i + 1 < count else None, Edge(count + i, 0)))
        for i in range(count)
    ]
    leaves = [LiveNode(f"leaf{i}", f"leaf{i}", 1 << 60, ()) for i in range(count)]
    return LiveGraph(tuple(nodes + leaves), (Edge(0, 0),), None)


@pytest.mark.parametrize("count", [5, 31, 33, 100])
def test_there_are_at_most_so_many_blocks(count: int) -> None:
    graph = chain(count)
    primals = {count + i: i for i in range(count)}
    regions = divide(graph, primals, CaptureOptions(split_at_leaf_grads=True), range(count)).regions
    assert [node for region in regions for node in region.nodes] == list(range(count))
    assert len(regions) <= MOST_BLOCKS + 1
    assert count > MOST_BLOCKS or len(regions) == count


def test_no_cut_changes_the_order_of_a_sum() -> None:
    """Node 0 gives to the last node and completes leaf A; nodes 1 and 2 also give to the last node."""
    last, leaf_a, leaf_b, leaf_c = 3, 4, 5, 6
    nodes = (
        LiveNode("n0", "n0", 9, (Edge(1, 0), Edge(last, 0), Edge(leaf_a, 0))),
        LiveNode("n1", "n1", 8, (Edge(2, 0), Edge(last, 0), Edge(leaf_b, 0))),
        LiveNode("n2", "n2", 7, (Edge(last, 0),)),
        LiveNode("n3", "n3", 6, (Edge(leaf_c, 0),)),
        LiveNode("a", "a", 1 << 60, ()),
        LiveNode("b", "b", 1 << 60, ()),
        LiveNode("c", "c", 1 << 60, ()),
    )
    graph = LiveGraph(nodes, (Edge(0, 0),), None)
    primals = {leaf_a: 0, leaf_b: 1, leaf_c: 2}
    structure = divide(graph, primals, CaptureOptions(split_at_leaf_grads=True), (0, 1, 2))
    assert [region.nodes for region in structure.regions] == [(0, 1), (2, 3)]
