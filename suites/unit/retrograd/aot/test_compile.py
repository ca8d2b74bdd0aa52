"""The fourth stage: one graph and several backends, at once or later, and values that stay what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import retrograd
from retrograd import aot
from retrograd.errors import OptionError
from unit.retrograd.aot.against_eager import captured, leaf, staged, tensor
from unit.retrograd.aot.joint_graphs import marking


def wave(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().exp()


class Recorder:
    """A backend that remembers the operators it was given, graph by graph."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        self.graphs.append([str(node.target).removesuffix(".default") for node in calls])
        return gm.forward


def gradients(call: Callable[..., Any]) -> list[Tensor]:
    x, w = leaf(3, 3), leaf(3, 3, seed=4)
    value = call.flat([x, w]) if not isinstance(call, type(wave)) else call(x, w)
    value.sum().backward()
    return [value.detach(), x.grad, w.grad]  # type: ignore[list-item]


def test_one_joint_graph_and_two_backends() -> None:
    joint = captured(wave, leaf(3, 3), leaf(3, 3))
    expected = gradients(wave)
    parts = aot.partition(joint)
    assert all(map(torch.equal, gradients(aot.compile(parts, "eager")), expected))
    recorder = Recorder()
    assert all(map(torch.equal, gradients(aot.compile(parts, recorder)), expected))
    ahead = [name for name in recorder.graphs[0] if name != "aten.t"]
    assert ahead == ["aten.mm", "aten.tanh", "aten.exp"]
    by_inductor = gradients(aot.compile(aot.partition(joint, "save_all"), "inductor"))
    torch.testing.assert_close(by_inductor, expected)


def test_another_backend_for_the_backward() -> None:
    ahead, behind = Recorder(), Recorder()
    parts = aot.partition(captured(wave, leaf(3, 3), leaf(3, 3)), "save_all")
    assert all(map(torch.equal, gradients(aot.compile(parts, ahead, behind)), gradients(wave)))
    assert len(ahead.graphs) == len(behind.graphs) == 1
    assert "aten.mm" in behind.graphs[0]


@pytest.mark.parametrize(("lazy", "at_once", "later"), [(True, 1, 2), (False, 2, 3)])
def test_lazily_or_not(lazy: bool, at_once: int, later: int) -> None:
    """What comes of a sum is expanded: code that is made before anything comes is made for what is dense."""
    recorder = Recorder()
    parts = aot.partition(captured(wave, leaf(3, 3), leaf(3, 3)))
    call = aot.compile(parts, recorder, lazy=lazy)
    assert len(recorder.graphs) == at_once
    assert all(map(torch.equal, gradients(call), gradients(wave)))
    assert all(map(torch.equal, gradients(call), gradients(wave)))
    assert len(recorder.graphs) == later


def test_a_backward_that_never_runs_is_never_compiled() -> None:
    recorder = Recorder()
    _, call = staged(lambda x, y: (x.sin(), y.exp()), leaf(3), leaf(3), forward=recorder)
    x, y = leaf(3), leaf(3)
    call.flat([x, y])[1].sum().backward()
    assert len(recorder.graphs) == 2
    assert (x.grad, torch.equal(y.grad, y.detach().exp())) == (None, True)


def test_capturing_now_and_compiling_later() -> None:
    model = nn.Linear(3, 2)
    x = tensor(4, 3)
    joint = captured(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    retrograd.reset()
    call = aot.compile(aot.partition(joint), "eager")
    assert torch.equal(call.flat([model.weight, model.bias, x]), model(x))


def test_capturing_twice_from_one_state() -> None:
    state = aot.create_state(wave, (leaf(3, 3), leaf(3, 3)))
    first, second = aot.capture(state), aot.capture(state)
    assert first.gm is not second.gm
    assert first.gm.code == second.gm.code
    assert first.signature == second.signature
    for joint in (first, second):
        assert all(map(torch.equal, gradients(aot.compile(aot.partition(joint), "eager")), gradients(wave)))


def test_capturing_twice_from_one_symbolic_state() -> None:
    state = aot.create_state(lambda x: (x * x.shape[0]).sin(), (tensor(5, 3),), dynamic=True)
    first, second = aot.capture(state), aot.capture(state)
    assert [node.target for node in first.gm.graph.nodes] == [node.target for node in second.gm.graph.nodes]
    x = tensor(7, 2)
    call = aot.compile(aot.partition(second), "eager")
    assert torch.equal(call.flat([x]), (x * 7).sin())


def test_stages_give_frozen_values() -> None:
    joint = captured(wave, leaf(3, 3), leaf(3, 3))
    for value, name in ((joint, "gm"), (joint.signature, "inputs"), (aot.partition(joint), "saved")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_modes_of_the_capture_do_not_leak() -> None:
    with torch.no_grad():
        joint = captured(wave, leaf(3, 3), leaf(3, 3))
    assert torch.is_grad_enabled()
    assert not aot.compile(aot.partition(joint), "eager").flat([leaf(3, 3), leaf(3, 3)]).requires_grad


def test_an_unknown_backend() -> None:
    parts = aot.partition(captured(wave, leaf(3, 3), leaf(3, 3)))
    with pytest.raises(OptionError, match="'nowhere'"):
        aot.compile(parts, "nowhere")
    with pytest.raises(OptionError, match="'nowhere'"):
        aot.compile(parts, "eager", "nowhere")


def test_errors_of_a_backend_are_its_own() -> None:
    def broken(gm: Any, example_inputs: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        aot.compile(aot.partition(captured(wave, leaf(3, 3), leaf(3, 3))), broken)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_what_is_compiled_is_called_like_what_was_captured(kind: str) -> None:
    fn: Callable[..., Any] = nn.Linear(3, 2) if kind == "module" else lambda x, *, by=2: x * by
    x = tensor(4, 3)
    _, call = staged(fn, x)
    assert torch.equal(call(x), fn(x))


def test_twenty_steps_of_training_through_all_stages() -> None:
    """Capture, mark for recomputation, compile, train."""

    def policy(node: torch.fx.Node) -> CheckpointPolicy | None:
        return CheckpointPolicy.MUST_RECOMPUTE if node.target is torch.ops.aten.tanh.default else None

    def train(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        call = None
        for _ in range(20):
            x = torch.randn(8, 4)
            if compile_it and call is None:
                joint = captured(model, x).apply(marking(policy))
                call = aot.compile(aot.partition(joint), "eager")
            y = call.flat([*model.parameters(), x]) if call is not None else model(x)
            y.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, train(True), train(False)))
