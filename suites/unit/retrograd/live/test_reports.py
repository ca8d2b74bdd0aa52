"""What a context's report says: of backwards that others captured, and of backends that fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrograd


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
