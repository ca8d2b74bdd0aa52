"""Compiling in the background: interpreted until the code is there, swapped between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

import retrograd
from retrograd.backends.background import wait_for_all
from retrograd.errors import FallbackWarning


class Held:
    """A backend that takes until it is let go, and counts how often its code runs."""

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self.threads: list[str] = []
        self.runs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.threads.append(threading.current_thread().name)
        assert self.may_finish.wait(60)

        def run(*args: Any) -> Any:
            self.runs += 1
            return gm.forward(*args)

        return run


def backward(weight: torch.Tensor, context: retrograd.CompiledAutograd) -> torch.Tensor:
    weight.grad = None
    loss = (weight.sin() * weight).sum()
    with context:
        loss.backward()
    assert weight.grad is not None
    return weight.grad


def test_interpreted_until_the_code_is_there() -> None:
    weight = torch.randn(5, requires_grad=True)
    wanted = weight.detach().cos() * weight.detach() + weight.detach().sin()
    backend = Held()
    context = retrograd.compiled_autograd(backend, background=True)
    for _ in range(3):
        assert torch.allclose(backward(weight, context), wanted)
    assert backend.runs == 0
    assert not context.wait(0.01)
    backend.may_finish.set()
    assert context.wait(60)
    assert torch.allclose(backward(weight, context), wanted)
    assert backend.runs == 1
    assert backend.threads == [next(name for name in backend.threads if name.startswith("retrograd-compile"))]


def test_what_cannot_be_compiled_stays_interpreted() -> None:
    def refuse(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        raise ValueError("not this one")

    weight = torch.randn(5, requires_grad=True)
    context = retrograd.compiled_autograd(refuse, background=True)
    first = backward(weight, context).clone()
    context.wait(60)
    assert torch.equal(backward(weight, context), first)
    assert "not this one" in str(context.explain())


def test_determinism_waits() -> None:
    weight = torch.randn(5, requires_grad=True)
    backend = Held()
    backend.may_finish.set()
    context = retrograd.compiled_autograd(backend, background=True)
    torch.use_deterministic_algorithms(True)
    try:
        backward(weight, context)
        backward(weight, context)
    finally:
        torch.use_deterministic_algorithms(False)
    assert backend.threads == [threading.current_thread().name]
    assert backend.runs >= 1


def test_strict_says_what_went_wrong() -> None:
    def refuse(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        raise ValueError("not this one")

    weight = torch.randn(5, requires_grad=True)
    context = retrograd.compiled_autograd(refuse, background=True, strict=True)
    backward(weight, context)
    context.wait(60)
    with pytest.raises(retrograd.LoweringError, match="not this one"):
        backward(weight, context)


def test_one_code_for_equal_segments() -> None:
    """While the first is being compiled, the others do not ask again."""
    weights = [torch.randn(4, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)
    backend = Held()
    context = retrograd.compiled_autograd(backend, background=True)

    def run() -> None:
        total = torch.zeros(4)
        for weight in weights:
            weight.grad = None
            total = (total + weight).sin()
        with context:
            total.sum().backward()

    run()
    backend.may_finish.set()
    assert wait_for_all(60)
    run()
    assert 0 < len(backend.threads) <= 3


@pytest.mark.parametrize("seconds", [60, 0.05])
def test_a_time_limit_holds_on_the_live_path(seconds: float) -> None:
    weight = torch.randn(5, requires_grad=True)
    backend = Held()
    context = retrograd.compiled_autograd(backend, compile_timeout=seconds)
    if seconds > 1:
        backend.may_finish.set()
    first = backward(weight, context).clone()
    assert (backend.runs == 1) is (seconds > 1)
    backend.may_finish.set()
    assert context.wait(60)
    assert torch.equal(backward(weight, context), first)
    assert backend.runs >= 1
    assert all(name.startswith("retrograd-compile") for name in backend.threads)


def test_a_time_limit_holds_for_both_halves_of_a_compiled_function() -> None:
    backend = Held()
    call = retrograd.compile(
        lambda x: (x.sin() * x).sum(), backend=backend, options={"compile_timeout": 0.05}
    )
    x, y = (torch.arange(5.0, requires_grad=True) for _ in range(2))
    with pytest.warns(FallbackWarning, match="compile_timeout"):
        call(x).backward()
    (y.sin() * y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert backend.runs == 0
    backend.may_finish.set()
    assert wait_for_all(60)
    call(x).backward()
    assert backend.runs >= 1


def test_a_time_limit_holds_for_the_pieces_of_a_step() -> None:
    weight, backend = torch.arange(5.0, requires_grad=True), Held()

    @retrograd.compile_step(backend=backend, compile_timeout=0.05)
    def step() -> torch.Tensor:
        weight.grad = None
        (weight.sin() * weight).sum().backward()
        return weight.grad  # type: ignore[return-value]

    wanted = step().clone()
    with pytest.warns(FallbackWarning, match="compile_timeout"):
        assert torch.allclose(step(), wanted)
    assert backend.runs == 0
    backend.may_finish.set()
    assert wait_for_all(60)
    assert torch.allclose(step(), wanted)
    assert backend.runs >= 1
