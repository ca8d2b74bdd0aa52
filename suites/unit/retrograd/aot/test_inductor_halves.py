"""Halves of a captured function under Inductor: strides, flags, and graphs that stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from retrograd import aot
from retrograd.backends import registry as inductor
from retrograd.backends.base import SEGMENT, Boxed, GraphKind


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphKind, list[tuple[int, ...]]]]:
    """Every half given to Inductor, with the strides of its example inputs."""
    seen: list[tuple[GraphKind, list[tuple[int, ...]]]] = []
    compile_half = inductor.InductorBackend.compile

    def noted(self: Any, gm: fx.GraphModule, examples: Sequence[Any], half: GraphKind = SEGMENT) -> Boxed:
        seen.append((half, [tuple(e.stride()) for e in examples if isinstance(e, torch.Tensor)]))
        return compile_half(self, gm, examples, half)

    monkeypatch.setattr(inductor.InductorBackend, "compile", noted)
    return seen


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Sigmoid())


def test_gradients_and_strides_of_convolutions_are_eagers(halves: list[Any]) -> None:
    eager = convolutions()
    compiled = aot.module(copy.deepcopy(eager), backend="inductor", strict=True)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 12, 12).to(memory_format=memory_format).requires_grad_()
        y = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        want, got = eager(x), compiled(y)
        assert got.stride() == want.stride()
        for _ in range(2):
            want.sum().backward(retain_graph=True)
            got.sum().backward(retain_graph=True)
        torch.testing.assert_close(y.grad, x.grad)
        for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
            assert q.grad is not None
            assert p.grad is not None
            assert q.grad.stride() == p.grad.stride()


def test_inductor_is_told_which_half_it_compiles(halves: list[Any]) -> None:
    fn = aot.function(lambda x: (x.sin() * x).cos(), backend="inductor", strict=True)
    fn(torch.ones(3, requires_grad=True)).sum().backward()
    with torch.no_grad():
        fn(torch.ones(3))
    assert [half for half, _ in halves] == [
        GraphKind(visible=1),
        GraphKind(is_backward=True, visible=1),
        GraphKind(is_inference=True, visible=1),
    ]


def test_a_backward_is_compiled_for_the_strides_that_were_saved(halves: list[Any]) -> None:
    def transposing(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        """Gives what is saved (all but the first output) other strides than traced."""

        def run(*args: Any) -> list[Any]:
            first, *saved = gm(*args)
            return [first, *(value.t().contiguous().t() for value in saved)]

        return run

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin()

    x = torch.randn(3, 4, requires_grad=True)
    state = aot.create_state(fn, (x,))
    parts = aot.partition(aot.capture(state), "save_all")
    code = aot.compile(parts, transposing, "inductor")
    code.flat([x]).sum().backward()
    got, x.grad = x.grad, None
    fn(x).sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert (1, 3) in halves[0][1]


def test_a_partition_stays_as_it_is_when_inductor_compiles_it() -> None:
    x = torch.randn(4, requires_grad=True)
    state = aot.create_state(lambda x: torch.nn.functional.gelu(x).relu(), (x,))
    parts = aot.partition(aot.capture(state))
    before = [str(gm.graph) for gm in (parts.forward, parts.backwards[0].gm)]
    aot.compile(parts, "inductor", lazy=False).flat([x]).sum().backward()
    assert [str(gm.graph) for gm in (parts.forward, parts.backwards[0].gm)] == before


def scored(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = logits * 2
    return nn.functional.cross_entropy(made.float(), targets), made


def test_what_a_user_gets_and_what_is_saved_have_memory_of_their_own() -> None:
    """Eager keeps what became of half-precision logits; here a user may change them, not what is kept."""
    compiled = aot.function(scored, backend="inductor", strict=True)
    found = []
    for call in (scored, compiled):
        x = torch.linspace(-2, 2, 64).view(4, 16).bfloat16().requires_grad_()
        loss, logits = call(x, torch.arange(4))
        with torch.no_grad():
            logits.mul_(3)
        found.append((logits.detach().clone(), torch.autograd.grad(loss, x)[0]))
    torch.testing.assert_close(found[1], found[0])


def test_what_inductor_writes_into_inputs_takes_no_memory() -> None:
    """An optimizer's step: what it reads is written in place, by generated code."""

    def step(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> None:
        momentum.lerp_(gradient, 0.1)
        weight.addcdiv_(momentum, (gradient.square() + 1).sqrt(), value=-0.1)

    torch.manual_seed(0)
    values = [torch.randn(64) for _ in range(3)]
    expected = [value.clone() for value in values]
    step(*expected)
    compiled = aot.function(step, backend="inductor", strict=True)
    compiled(*values)
    torch.testing.assert_close(values, expected)
    step(*expected)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(*values)
    torch.testing.assert_close(values, expected)
    assert not sum(max(event.cpu_memory_usage, 0) for event in profile.events() if event.cpu_parent is None)
