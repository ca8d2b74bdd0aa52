"""What a context's report says: of backwards that others captured, and of backends that fail."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrograd
from retrograd.errors import Reason
from retrograd.report import GraphReport, Report
from retrograd.runtime import callers


def backward() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    (x * x).sin().sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(3).cos())
    return x


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_each_context_counts_its_own_runs(backend: str) -> None:
    contexts = []
    for times in (2, 3, 1):
        with retrograd.compiled_autograd(backend) as context:
            for _ in range(times):
                backward()
        contexts.append(context)
    assert [[entry.runs for entry in context.explain().backwards] for context in contexts] == [[2], [3], [1]]
    assert [entry.runs for entry in retrograd.explain().backwards] == [6]
    assert "nothing was captured" not in str(contexts[1].explain())


def raising(*_: Any) -> Any:
    raise ValueError("no such operator")


def giving_none(*_: Any) -> Any:
    return None


def giving_code(code: Callable[..., Any]) -> Callable[..., Any]:
    def backend(*_: Any) -> Any:
        return code

    return backend


FAULTY = [
    raising,
    giving_none,
    giving_code(lambda *_: ()),
    giving_code(lambda *_: (1,)),
    giving_code(raising),
]


@pytest.mark.parametrize("backend", FAULTY)
def test_a_faulty_backend_is_told_of_once_in_a_warning_and_in_each_report(backend: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contexts = []
        for _ in range(2):
            with retrograd.compiled_autograd(backend) as context:
                for _ in range(3):
                    backward()
            contexts.append(context)
    told = [warning for warning in caught if issubclass(warning.category, retrograd.FallbackWarning)]
    assert len(told) == 1
    assert told[0].filename == __file__
    for report in (*(context.explain() for context in contexts), retrograd.explain()):
        assert {reason.code for reason in report.fallbacks} == {"segment-not-compiled"}


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_code_that_raises_later_stands_in_the_report_of_its_context() -> None:
    runs = 0

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        def code(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs > 2:
                raise ValueError("later")
            return gm(*args)

        return code

    with retrograd.compiled_autograd(backend) as context:
        for _ in range(4):
            backward()
    assert {reason.code for reason in context.explain().fallbacks} == {"code-failed"}


def test_an_error_of_the_program_is_no_fallback() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * x
    y.register_hook(raising)
    with (
        warnings.catch_warnings(action="error", category=retrograd.FallbackWarning),
        retrograd.compiled_autograd(raising) as context,
        pytest.raises(ValueError, match="no such operator"),
    ):
        y.sin().sum().backward()
    assert not context.explain().fallbacks


# texts


def layers(count: int, hooks: bool) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count)))
    for parameter in model.parameters() if hooks else ():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    return model


def test_a_report_of_a_deep_model_is_short_and_its_details_count_equal_segments() -> None:
    model = layers(12, hooks=True)
    with retrograd.compiled_autograd("aten") as context:
        model(torch.ones(2, 4)).sum().backward()
    text = re.sub(r"\d+\.\d+ s", "N s", str(context.explain()))
    assert text.splitlines()[:3] == [
        "backward of 50 nodes, run 1 time, backend aten",
        "  segments      24: 12 call by call: too little to compile, 9 with the code of an equal one, "
        "2 call by call: too small to compile in the first few runs, 1 more",
        "  opaque calls  24 post-accumulate-grad hook",
    ]
    assert "nothing fell back to eager" in text
    details = context.explain().details().splitlines()
    (shared,) = {line for line in details if "shared with an equal segment" in line and "segment 4, " in line}
    assert shared.count(",") == 9
    assert len(details) < 30
    assert "guards  " not in [line.strip() for line in details], "no line without guards"


def test_details_name_every_kind_of_call() -> None:
    w = torch.ones(2, requires_grad=True)
    with retrograd.compiled_autograd("eager") as context:
        y = w * 2
        y.register_hook(lambda grad: None)
        y.grad_fn.register_prehook(lambda grads: None)
        y.grad_fn.register_hook(lambda *_: None)
        w.register_post_accumulate_grad_hook(lambda _: None)
        y.sum().backward()
    report = context.explain()
    assert "  opaque calls  4: 1 tensor hook, 1 node pre hook, 1 node post hook, 1 more" in str(report)
    assert "1 node post hook, 1 post-accumulate-grad hook" in report.details()
    assert "more" not in report.details()


def test_a_report_shows_the_first_few_of_each_kind_and_says_how_many_there_are() -> None:
    report = Report()
    for number in range(40):
        report.graphs.append(GraphReport(f"graph {number}", 3, 4, 1, 8, "print (a.py:1)"))
        reason = Reason(f"code-{number}", "it is so", "live.run", node="Mul (1 of 2)", way_out="that")
        report.fallbacks[reason] = 40 - number
        report.notes[Reason(f"note-{number}", "it is so", "live.run", way_out="nothing to do")] = None
    for number in range(5):
        with retrograd.compiled_autograd("eager") as context:
            layers(number + 1, hooks=True)(torch.ones(2, 4)).sum().backward()
        report.backwards.extend(context.explain().backwards)
    lines = re.sub(r"reports.py:\d+", "reports.py:N", str(report)).splitlines()
    assert len(lines) <= 27, "\n".join(lines)
    assert lines[2:5] == [
        "graph 2: 3 calls forward, 4 backward in 1 autograd node, 8 bytes saved; ends at print (a.py:1)",
        "and 37 more graphs: print(report.details())",
        "backward of 6 nodes from SumBackward0 at test_reports.py:N, run 1 time, backend eager",
    ]
    assert "and 2 more backwards: print(report.details())" in lines
    at = lines.index("ran as eager runs it 40 times [code-0] it is so (Mul (1 of 2))")
    assert lines[at + 1] == "    try that"
    assert "nothing fell back to eager" not in lines
    assert lines[lines.index("notes, no failures:") + 1] == "[note-0] it is so; nothing to do"
    assert "code-39" in report.details()


def test_equal_backwards_are_one_entry_of_the_text() -> None:
    with retrograd.compiled_autograd("eager") as context:
        for _ in range(3):
            layers(2, hooks=True)(torch.ones(2, 4)).sum().backward()
    assert len(context.explain().backwards) in (1, 3)
    assert str(context.explain()).count("backward") == 1
    assert "run 3 times" in str(context.explain())


def test_each_of_several_backwards_says_where_it_begins(tmp_path) -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.zeros(2)
    with retrograd.compiled_autograd("eager") as context:
        for _ in range(3):
            fakes = w.sin()
            fakes.mean().backward(retain_graph=True)
            grad_of(fakes.exp().sum(), w)
        line = sys._getframe().f_lineno
    heads = [text for text in str(context.explain()).splitlines() if text.startswith("backward")]
    assert heads == [
        f"backward of 4 nodes from MeanBackward0 at test_reports.py:{line - 2}, run 3 times, backend eager",
        f"backward of 5 nodes from SumBackward0 at test_reports.py:{GRAD_LINE}, run 3 times, backend eager",
    ]
    for head in heads:
        assert head in context.explain().details()
    context.explain().save_html(tmp_path / "report.html")
    assert f"from MeanBackward0 at test_reports.py:{line - 2}<" in (tmp_path / "report.html").read_text()


def grad_of(loss: torch.Tensor, w: torch.Tensor) -> None:
    torch.autograd.grad(loss, w, retain_graph=True)


GRAD_LINE = grad_of.__code__.co_firstlineno + 1


def test_a_step_says_where_each_backward_begins() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    @retrograd.compile_step(backend="eager")
    def step(x: torch.Tensor) -> None:
        other(one(x)).sum().backward()
        other(x).sin().mean().backward()

    first = step.fn.__code__.co_firstlineno
    for _ in range(3):
        step(torch.ones(1, 2))
    for number in (2, 3):
        assert f"at test_reports.py:{first + number}, run 2 times" in str(step.explain())


def test_a_known_backward_does_not_look_for_its_line(monkeypatch) -> None:
    with retrograd.compiled_autograd("eager") as context:
        backward()
        monkeypatch.delattr(callers, "_users_frame")
        backward()
    (entry,) = context.explain().backwards
    assert entry.runs == 2


def test_a_lowering_counts_its_seconds() -> None:
    with retrograd.compiled_autograd("aten") as context:
        backward()
    (entry,) = context.explain().backwards
    assert sum(low.seconds for low in entry.lowerings) == context.explain().compile_seconds > 0
