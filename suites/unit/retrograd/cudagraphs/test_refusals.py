"""Which graphs of operators are not recorded."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.cudagraphs import graphed_function
from retrograd.cudagraphs.graphed_function import GraphedFunction, graphed
from retrograd.cudagraphs.refusals import why_not_recorded
from retrograd.graph.fx import written_inputs
from unit.retrograd.cudagraphs.without_device import Recorder


def traced(fn, *args, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*args).graph


def test_a_graph_of_one_device_and_static_sizes_is_recorded(monkeypatch):
    monkeypatch.setattr(graphed_function, "_program", Recorder().program)
    graph = traced(lambda a, b: (a @ b).relu(), torch.ones(3, 3), torch.ones(3, 3))
    assert why_not_recorded([graph], "cpu") is None
    assert isinstance(graphed(lambda inputs: inputs, graph, tell=print), GraphedFunction)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda a: a * 2 if a.sum().item() is None else a.sin(), "what it does depends on values"),
        (lambda a: a.nonzero(), "what it does depends on values"),
        (lambda a: a.add_(1), "it writes to an input (add_)"),
        (lambda a: torch.cond(a.sum() > 0, torch.sin, torch.cos, (a,)), "it runs other graphs (cond)"),
        (lambda a: a.to_sparse(), "it has tensors that are not strided"),
        (lambda a: a.to("meta"), "it has tensors on meta"),
    ],
)
def test_what_is_not_recorded(fn, text):
    reason = why_not_recorded([traced(fn, torch.ones(3))], "cpu")
    assert reason is not None
    assert text in reason.text


def filled(a):
    return torch.where(a > 0, a, torch.tensor(-1.0).exp()) * torch.tensor(2.0)


@pytest.mark.parametrize(
    ("fn", "is_recorded"),
    [
        (filled, True),
        (lambda a: a * torch.tensor([1.0, 2.0, 3.0]).to("meta"), False),
        (lambda a: a * torch.rand(()), False),
        (lambda a: (a * 2, torch.tensor(2.0)), False),
        (lambda a: a * torch.tensor(2.0).to("meta", non_blocking=True), False),
    ],
    ids=["numbers", "a vector", "drawn", "a result", "copied later"],
)
def test_constant_numbers_on_the_host_are_recorded(fn, is_recorded):
    """A kernel is given their value, which stays the same."""
    reason = why_not_recorded([traced(fn, torch.empty(3, device="meta"))], "meta")
    assert reason is None if is_recorded else "it has tensors on cpu" in reason.text


def test_random_numbers_are_recorded_but_for_those_of_another_generator():
    graph = traced(torch.bernoulli, torch.ones(3))
    assert why_not_recorded([graph], "cpu") is None
    drawing = next(
        node for node in graph.nodes if node.op == "call_function" and "bernoulli" in str(node.target)
    )
    drawing.kwargs = {**drawing.kwargs, "generator": torch.Generator()}
    reason = why_not_recorded([graph], "cpu")
    assert reason is not None
    assert "a generator of its own (bernoulli" in reason.text


def test_numbers_are_recorded_if_they_are_sizes():
    graph = traced(lambda a, n: a.sin() * n, torch.ones(3), 5, mode="symbolic")
    assert why_not_recorded([graph], "cpu") is None
    assert why_not_recorded([graph, graph], "cpu").code == "cuda-graphs-dynamic"
    x, _ = graph.find_nodes(op="placeholder")
    x.meta["val"] = x.meta["val"].new_empty(2 * x.meta["val"].size(0))
    assert "do not tell its sizes" in why_not_recorded([graph], "cpu").text
    x.meta["val"] = 0.5
    assert why_not_recorded([graph], "cpu").code == "cuda-graphs-dynamic"


def test_tensors_on_another_type_of_device_are_not_recorded_and_the_code_stays_as_it_is():
    told = []
    graph = traced(lambda a: a.sin(), torch.ones(3))

    def code(inputs):
        return inputs

    assert graphed(code, graph, tell=told.append) is code
    assert [reason.text for reason in told] == ["no CUDA graph is recorded: it has tensors on cpu"]


def test_attention_that_drops_out_is_recorded():
    graph = torch.fx.Graph()
    value = graph.placeholder("a")
    value.meta["val"] = torch.ones(1)
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    graph.output((graph.call_function(op, (value, value, value, 0.1)),))
    assert why_not_recorded([graph], "cpu") is None


def test_one_of_several_graphs_is_enough_to_refuse_them():
    fine, looking = traced(torch.sin, torch.ones(3)), traced(torch.nonzero, torch.ones(3))
    assert why_not_recorded([fine, fine], "cpu") is None
    assert why_not_recorded([fine, looking], "cpu").code == "cuda-graphs-operator"
    assert why_not_recorded([], "cpu").text.endswith("are on no device, and not on one device")


def test_code_that_writes_to_an_input_is_recorded_if_that_is_all_it_runs():
    graph = traced(lambda a: a.copy_(a.sin()), torch.ones(3))
    assert why_not_recorded([graph], "cpu") is None
    assert written_inputs(graph) == {0}
    assert "it writes to an input" in why_not_recorded([graph, graph], "cpu").text
