"""The public surface: names, laziness, arguments and reports."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import retrograd
from retrograd import aot
from retrograd.report import NOTHING, GraphReport, Report
from unit.retrograd.programs import leaf


def test_importing_is_lazy() -> None:
    code = "import sys, retrograd; print([m for m in sys.modules if m.startswith(('torch.', 'retrograd.'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['retrograd.version']"  # a constant, and nothing of torch


def test_every_public_name_resolves_and_is_listed() -> None:
    assert set(retrograd.__all__) <= set(dir(retrograd))
    for name in retrograd.__all__:
        assert getattr(retrograd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = retrograd.nothing


def test_explain_runs_a_function_and_reports_what_was_captured() -> None:
    w = leaf()
    w.register_hook(lambda grad: None)
    report = retrograd.explain(lambda scale: (w * scale).sum().backward(), 3.0)
    (backward,) = report.backwards
    assert [call.name for call in backward.graph.node_calls] == [
        "torch::autograd::GraphRoot",
        "SumBackward0",
        "MulBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    assert backward.runs == 1
    text = str(report)
    assert text == (
        "backward of 4 nodes, run 1 time, backend eager\n"
        "  segments      1 call by call, as backend='eager' runs them\n"
        "  opaque calls  1 tensor hook\n"
        "nothing fell back to eager"
    )


@pytest.mark.parametrize("fn", [torch.nn.Linear(2, 1), lambda x: x.sum().backward()])
def test_explain_says_which_arguments_are_missing(fn: Any) -> None:
    with pytest.raises(retrograd.OptionError, match=r"missing a required argument: '(input|x)'") as caught:
        retrograd.explain(fn)
    assert "what retrograd.compile returned: retrograd.explain(compiled)" in str(caught.value)


def test_explain_reports_on_what_compile_returned() -> None:
    first, second = torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh())
    one, other = (retrograd.compile(module, backend="eager") for module in (first, second.forward))
    x = torch.ones(4, 2)
    nothing = "nothing was captured: no backward ran here, and no call was compiled"
    assert str(retrograd.explain(one)) == nothing
    (one(x) * 2).sum().backward()
    other(torch.ones(4, 3)).sum().backward()
    reports = [retrograd.explain(one), retrograd.explain(other)]
    assert [len(report.graphs) for report in reports] == [1, 1]
    assert [len(report.backwards) for report in reports] == [1, 1]
    assert reports[0].graphs[0].forward < reports[1].graphs[0].forward
    assert reports[0].compile_seconds > 0
    assert len(retrograd.explain().graphs) == 2


def test_explain_reports_on_staged_functions_modules_and_steps() -> None:
    linear = torch.nn.Linear(2, 3)
    module = aot.module(linear, backend="eager")
    function = aot.function(lambda x: x.sin() * x, backend="eager")
    for made in (module, function):
        assert str(retrograd.explain(made)) == NOTHING
        made(torch.ones(4, 2, requires_grad=True)).sum().backward()
        assert len(retrograd.explain(made).graphs) == 1
    function(torch.ones(4, 2).to_sparse())
    assert [reason.code for reason in retrograd.explain(function).fallbacks] == ["input"]
    assert not retrograd.explain(module).fallbacks
    assert len(retrograd.explain().graphs) == 2
    step = retrograd.compile_step(lambda x: linear(x).sum().backward(), backend="eager")
    step(torch.ones(4, 2))
    assert str(step.explain()).endswith(str(retrograd.explain(step)))
    assert retrograd.explain(step) is step.explain().pieces


class WithMethod:
    @functools.partial(aot.function, backend="eager")
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_explain_reports_on_a_compiled_method() -> None:
    one = WithMethod()
    one.double(torch.ones(3))
    assert retrograd.explain(one.double) is WithMethod.double.explain()


class Hooked(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y.sin()


def test_a_callable_that_shares_what_was_not_compiled_is_told_why() -> None:
    torch.compiler.reset()
    both = [retrograd.compile(Hooked(2, 3), backend="eager") for _ in range(2)]
    for compiled in both:
        compiled(torch.ones(4, 2)).sum().backward()
        assert [reason.code for reason in retrograd.explain(compiled).fallbacks] == ["hook-in-trace"]


class Penalised(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def test_each_callable_that_shares_code_is_told_what_falls_back() -> None:
    torch.compiler.reset()
    reports = []
    for _ in range(2):
        compiled = retrograd.compile(Penalised(2, 3), backend="eager")
        for _ in range(20):
            x = torch.ones(4, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
            slope.pow(2).sum().backward()
        reports.append(retrograd.explain(compiled))
        assert "backwards-rerun" in str(reports[-1])
        assert "nothing fell back" not in str(reports[-1])


class Alone(torch.nn.Linear):
    """Its forward takes no arguments, and runs a backward."""

    def forward(self) -> None:  # type: ignore[override]
        self.weight.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda module: copy.deepcopy(retrograd.compile(module, backend="eager")),
        lambda module: pickle.loads(pickle.dumps(retrograd.compile(module, backend="eager"))),
        lambda module: torch.compile(module, backend="retrograd"),
        torch.nn.DataParallel,
    ],
    ids=["deepcopy", "pickle", "torch.compile", "DataParallel"],
)
@pytest.mark.parametrize("kind", [torch.nn.Linear, Alone])
def test_explain_never_calls_a_module_without_arguments(make: Any, kind: Any) -> None:
    module = kind(2, 1)
    with pytest.raises(retrograd.OptionError, match=r"retrograd\.explain\(compiled\)"):
        retrograd.explain(make(module))
    assert module.weight.grad is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_explain_reports_on_what_a_copy_compiled(again: Any) -> None:
    torch.compiler.reset()
    copied = again(retrograd.compile(torch.nn.Linear(2, 3), backend="eager"))
    copied(torch.ones(4, 2)).sum().backward()
    assert len(retrograd.explain(copied).graphs) == 1


def test_explain_lets_a_type_error_of_the_function_pass() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        retrograd.explain(lambda: 1 + "1")  # type: ignore[operator]


def test_a_report_leaves_out_empty_graphs_and_says_what_has_no_gradient() -> None:
    report = Report()
    for forward, ended_by in ((0, ""), (0, "print"), (8, "")):
        report.graphs.append(GraphReport("a graph", forward, 0, 0, 0, ended_by))
    assert str(report) == (
        "a graph: 0 calls forward, nothing to differentiate; ends at print\n"
        "a graph: 8 calls forward, nothing to differentiate\n"
        "nothing fell back to eager"
    )


def test_explain_without_a_function_tells_of_the_whole_process() -> None:
    w = leaf()
    for backend in ("eager", "aten"):
        with retrograd.compiled_autograd(backend):
            w.sin().sum().backward()
    assert [backward.backend for backward in retrograd.explain().backwards] == ["eager", "aten"]
    retrograd.reset()
    assert str(retrograd.explain()) == NOTHING


def test_the_process_report_is_bounded_by_its_structures() -> None:
    w = leaf()
    for _ in range(5):
        w.grad = None
        with retrograd.compiled_autograd("eager"):
            w.sin().sum().backward()
    (backward,) = retrograd.explain().backwards
    assert backward.runs == 5


@pytest.mark.parametrize("target", [3, "model", [1]])
def test_what_cannot_be_called_is_not_compiled(target: object) -> None:
    with pytest.raises(retrograd.OptionError, match=r"option 'target': got (.|\n)*a module, or a function"):
        retrograd.compile(target)
