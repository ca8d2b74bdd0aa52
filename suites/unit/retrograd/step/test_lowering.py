"""Backends that compile: what they are given, and how far from eager they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import retrograd


def train(wrap, make, calls=4):
    """Losses, parameters and states after some steps with a rate that changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model.scale = nn.Parameter(torch.tensor(1.0))
    opt = make(model.parameters())

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x) * model.scale, y)
        loss.backward()
        opt.step()
        return loss, loss.item()

    step, found = wrap(step), []
    for _ in range(calls):
        opt.param_groups[0]["lr"] *= 0.9
        loss, number = step(torch.randn(5, 4), torch.randint(3, (5,)))
        found += [loss.detach().clone(), torch.tensor(number)]
    states = [value for state in opt.state.values() for value in state.values()]
    return [*found, *model.parameters(), *(p.grad for p in model.parameters()), *states], step


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiler_gets_tensors_only(name):
    graphs = []

    def backend(gm, examples):
        assert all(isinstance(example, torch.Tensor) for example in examples)
        graphs.append(gm.graph)
        return gm

    expected, _ = train(lambda step: step, OPTIMIZERS[name])
    got, step = train(
        lambda step: retrograd.compile_step(step, backend=backend, strict=True), OPTIMIZERS[name]
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert graphs
    items = [node for graph in graphs for node in graph.nodes if "scalar_dense" in str(node.target)]
    assert items == []
    assert step.explain().wholes[-1].runs >= 1


def test_parameters_and_states_are_written_inside_the_graph():
    graphs = []

    def backend(gm, examples):
        graphs.append(gm.graph)
        return gm

    train(lambda step: retrograd.compile_step(step, backend=backend, strict=True), OPTIMIZERS["adam"])
    written = [node for node in graphs[-1].nodes if node.target is torch.ops.aten.copy_.default]
    assert len(written) == 5 * 4  # five parameters: each with two averages and a maximum


def test_inductor():
    expected, _ = train(lambda step: step, OPTIMIZERS["adam"], calls=3)
    got, step = train(
        lambda step: retrograd.compile_step(step, backend="inductor", strict=True),
        OPTIMIZERS["adam"],
        calls=3,
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sum(whole.runs for whole in step.explain().wholes) == 2


def test_a_number_in_the_way_runs_in_pieces():
    w = torch.randn(4, requires_grad=True)

    def step(x):
        w.grad = None
        loss = (x * w).sum()
        loss.backward()
        return (x * loss.item()).sum()  # a tensor of a number of a tensor

    compiled = retrograd.compile_step(step, backend=lambda gm, examples: gm)
    x = torch.ones(4)
    compiled(x)
    with pytest.warns(retrograd.FallbackWarning, match="a number read from a tensor"):
        assert compiled(x) == step(x)
    assert [reason.code for reason in compiled.explain().pieces] == ["not-compiled"]


def test_a_backend_that_raises():
    def backend(gm, examples):
        raise ValueError("not today")

    compiled = retrograd.compile_step(lambda x: x.sum() * 2, backend=backend)
    compiled(torch.ones(3))
    with pytest.warns(retrograd.FallbackWarning, match="not today"):
        assert compiled(torch.ones(3)) == 6


def test_what_is_compiled_is_said():
    step = retrograd.compile_step(backend="eager")(lambda x: x * 2)
    assert str(step.explain()) == "has not been called"
    for _ in range(3):
        step(torch.ones(3))
    assert str(step.explain()) == (
        "whole step of 1 calls, run 2 times, backend eager: first use\n\n"
        "ran eagerly 1 times, before the first capture"
    )
    step.reset()
    assert str(step.explain()) == "has not been called"


def test_an_unknown_backend():
    with pytest.raises(retrograd.UnknownBackendError):
        retrograd.compile_step(lambda x: x, backend="fast")
