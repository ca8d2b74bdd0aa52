"""What stands around a call that cannot be recorded is recorded, and computes what eager computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import retrograd
from retrograd import aot
from retrograd.cudagraphs import graphed_call, graphed_function
from retrograd.report import process_report
from unit.retrograd.cudagraphs.without_device import Recorder

LAYERS, STEPS = 3, 14


class Waiting(Recorder):
    """Operators of `operators` cannot be called while something is recorded, nor may they be replayed."""

    is_recording = False

    def record(self, fn, inputs, device, pool):
        self.is_recording = True
        try:
            return super().record(fn, inputs, device, pool)
        finally:
            self.is_recording = False


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    torch._dynamo.reset()
    made = Waiting()
    monkeypatch.setattr(graphed_function, "_program", made.program)
    process_report.clear()
    graphed_call._forget()
    yield made
    graphed_call._forget()


@pytest.fixture
def operators(recorder: Waiting) -> Iterator[tuple[Any, list[str]]]:
    """Operators ``waits``, ``tagged`` and ``both`` (with two results), their backwards, and their calls."""
    calls: list[str] = []
    with torch.library._scoped_library("retrograd_stretches", "DEF") as library:

        def define(name: str, fn: Any, results: str = "Tensor", tags: Any = ()) -> None:
            def run(*args: torch.Tensor) -> Any:
                calls.append(name)
                if recorder.is_recording:
                    raise RuntimeError("operation not permitted when stream is capturing")
                return fn(*args)

            takes = "Tensor x, Tensor g" if name.endswith("backward") else "Tensor x"
            library.define(f"{name}({takes}) -> {results}", tags=(torch.Tag.pt2_compliant_tag, *tags))
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"retrograd_stretches::{name}", fn, lib=library)

        unsafe = (torch.Tag.cudagraph_unsafe,)
        for name, tags in (("waits", ()), ("tagged", unsafe)):
            define(name, lambda x: x * x, tags=tags)
            define(f"{name}_backward", lambda x, g: 2 * x * g, tags=tags)
            _differentiated(library, name)
        define("both", lambda x: (x * x, x.sin()), "(Tensor, Tensor)", unsafe)
        yield torch.ops.retrograd_stretches, calls


def _differentiated(library: Any, name: str) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.retrograd_stretches, f"{name}_backward")(*ctx.saved_tensors, grad)

    torch.library.register_autograd(
        f"retrograd_stretches::{name}",
        backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )


class Layer(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.operator = [operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.operator[0](self.norm(self.into(x)).sigmoid()).tanh())


def deep(operator: Any, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(operator) for _ in range(layers))).double()


def trained(model: nn.Module, run: Any) -> list[Any]:
    """What a user keeps of steps with moving batches."""
    torch.manual_seed(1)
    kept = []
    for _ in range(STEPS):
        model.zero_grad()
        out = run(torch.randn(5, 8, dtype=torch.float64))
        out.square().sum().backward()
        kept.append((out.detach(), [p.grad for p in model.parameters()]))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
    return kept


def check_steps(operator: Any, **options: Any) -> None:
    model = deep(operator)
    other = copy.deepcopy(model)
    expected = trained(model, model)
    got = trained(other, aot.module(other, cudagraphs=True, **options))
    torch.testing.assert_close(got, expected)


def check_replayed(recorder: Waiting, missed: int) -> None:
    """Of each half, a stretch before, between and behind the operators is replayed in nearly all steps."""
    stretches = 2 * (LAYERS + 1)
    assert recorder.records >= stretches
    assert recorder.replays >= stretches * (STEPS - graphed_call.WARM_UPS - missed)


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_what_is_known_not_to_be_recorded_stands_between_recordings(operators, recorder, backend):
    ops, calls = operators
    check_steps(ops.tagged, backend=backend)
    check_replayed(recorder, missed=6)
    # eager's model, and ours: an operator is called in each step, and no replay calls it
    assert [calls.count(name) for name in ("tagged", "tagged_backward")] == [2 * LAYERS * STEPS] * 2
    told = [reason.text for reason in process_report.notes if reason.code == "cuda-graphs-operator"]
    assert len(told) == 2
    assert all("but what stands around it is: what it does depends on values" in text for text in told)


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_what_fails_to_be_recorded_stands_between_recordings_from_then_on(operators, recorder, backend):
    ops, calls = operators
    check_steps(ops.waits, backend=backend)
    check_replayed(recorder, missed=8)
    # and each half has tried it once
    assert calls.count("waits") == 2 * LAYERS * STEPS + 1
    assert calls.count("waits_backward") == 2 * LAYERS * STEPS + 1
    # what is captured later knows it
    del calls[:]
    check_steps(ops.waits, backend=backend)
    assert calls.count("waits") == 2 * LAYERS * STEPS


def test_results_lie_as_those_of_the_code_in_one_piece(operators, recorder):
    """A backend may choose other strides for the whole than for stretches: the backward is compiled for
    those of the whole."""
    ops, _ = operators
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        is_whole = any("waits" in str(node.target) for node in gm.graph.nodes)

        def run(*args: torch.Tensor) -> Any:
            results = gm(*args)
            seen.append(is_whole)
            return [turned(one) if is_whole and one.dim() == 2 else one for one in results]

        return run

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    check_steps(ops.waits, backend=backend)
    assert seen.count(True) < len(seen)
    assert recorder.replays


def test_several_results_of_one_call_do_not_cross_a_cut(operators, recorder):
    ops, _ = operators
    x = torch.randn(6, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        a, b = ops.both(x.sin().cos())
        values, places = (a.exp() + 1).max(0)
        c, _ = ops.both(values * 2)
        return (c * b.tanh().sigmoid() + places).exp()

    run = aot.function(fn, backend="aten", cudagraphs=True)
    for _ in range(graphed_call.WARM_UPS + 4):
        torch.testing.assert_close(run(x), fn(x))
    assert recorder.replays


def test_equal_stretches_are_compiled_once(operators, recorder):
    ops, _ = operators
    counts = []
    for layers in (4, 7):
        graphs: list[str] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any], graphs: list[str] = graphs) -> Any:
            graphs.append(str(gm.code))
            return gm

        run = aot.module(deep(ops.tagged, layers), backend=backend, cudagraphs=True)
        run(torch.randn(5, 8, dtype=torch.float64)).sum().backward()
        counts.append(len(graphs))
    assert counts[0] == counts[1] < 4 * 4


def test_a_stretch_writes_to_inputs(operators, recorder):
    ops, _ = operators
    counts = [torch.zeros(4), torch.zeros(4)]

    def fn(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        y = ops.tagged((x * 2 + 1).relu())
        count.add_(y.mean(0))
        return (y + count).sin().exp()

    run = aot.function(fn, backend="aten", cudagraphs=True)
    for _ in range(graphed_call.WARM_UPS + 4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(run(x, counts[0]), fn(x, counts[1]))
        torch.testing.assert_close(*counts)


def test_nothing_is_cut_where_hardly_anything_would_be_recorded(operators, recorder):
    ops, _ = operators
    run = aot.function(lambda x: ops.tagged(x.sin()), backend="aten", cudagraphs=True)
    x = torch.randn(3)
    for _ in range(graphed_call.WARM_UPS + 3):
        torch.testing.assert_close(run(x), x.sin() ** 2)
    assert recorder.records == 0
    (reason,) = process_report.notes
    assert reason.text.startswith("no CUDA graph is recorded")


def test_through_torch_compile(operators, recorder):
    ops, _ = operators
    model = deep(ops.waits)
    other = copy.deepcopy(model)
    expected = trained(model, model)
    run = retrograd.compile(other, backend="aten", options={"cudagraphs": True})
    torch.testing.assert_close(trained(other, run), expected)
    check_replayed(recorder, missed=8)
