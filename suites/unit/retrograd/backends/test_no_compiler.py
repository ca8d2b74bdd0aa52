"""Without a C++ compiler everything runs as eager runs it, whichever way in, and one warning says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config, cpp_builder

import retrograd
from retrograd import aot


@pytest.fixture(autouse=True)
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))}):
        yield
    cpp_builder.cpp_compiler_search.cache_clear()
    retrograd.disable()


def loss_of(w: torch.Tensor) -> torch.Tensor:
    return (w.sin() * w.exp()).sum()


def backward(w: torch.Tensor) -> None:
    loss_of(w).backward()


def in_context(w: torch.Tensor) -> None:
    with retrograd.compiled_autograd():
        loss_of(w).backward()


def enabled(w: torch.Tensor) -> None:
    retrograd.enable()
    loss_of(w).backward()


WAYS: dict[str, Callable[[], Callable[[torch.Tensor], object]]] = {
    "compiled_autograd": lambda: in_context,
    "enable": lambda: enabled,
    "torch.compile": lambda: after(torch.compile(loss_of, backend="retrograd")),
    "compile": lambda: after(retrograd.compile(loss_of)),
    "compile_step": lambda: retrograd.compile_step(backward),
    "aot.function": lambda: after(aot.function(loss_of)),
}


def after(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], object]:
    return lambda w: loss(w).backward()


@pytest.mark.parametrize("way", WAYS)
def test_one_warning_says_why_and_what_to_do(way: str) -> None:
    w = torch.randn(8, requires_grad=True)
    backward(w)
    expected, run = w.grad, WAYS[way]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            w.grad = None
            run(w)
            assert torch.equal(w.grad, expected)
    told = [str(one.message) for one in caught if one.category is retrograd.FallbackWarning]
    assert len(told) == 1
    assert "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, " in told[0]
    where = "  code   no-compiler\n  stage  backends.inductor\n"
    assert f"\n{where}  try    install a C++ compiler such as g++" in told[0]
    assert {reason.code for reason in retrograd.explain().fallbacks} == {"no-compiler"}


def strict_backward(w: torch.Tensor) -> None:
    with retrograd.compiled_autograd(strict=True):
        backward(w)


def staged(w: torch.Tensor) -> Any:
    return aot.compile(aot.partition(aot.capture(aot.create_state(loss_of, (w,)))))


@pytest.mark.parametrize("raises", [strict_backward, staged, aot.function(loss_of, strict=True)])
def test_in_strict_mode_and_in_stages_it_is_an_error(raises: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(retrograd.RetrogradError, match="No working C\\+\\+ compiler") as refused:
        raises(torch.randn(8, requires_grad=True))
    error: Any = refused.value
    assert error.reason.code == "no-compiler"
    assert "install a C++ compiler" in str(error)
