"""Code that raises in a later run than its first: the graph is interpreted, unless an input is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import retrograd
from retrograd.backends.fallible import compile_fallible
from retrograd.backends.registry import InductorBackend, find_backend
from unit.retrograd.backends.test_registry import losses

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")

Before = Callable[[list[Any]], None]


class Third:
    """A backend whose code does something with its list of inputs and raises in its third run."""

    def __init__(self, before: Before, always: bool = False) -> None:
        self.before, self.always, self.runs = before, always, 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            self.runs += 1
            if self.runs == 3 or (self.always and self.runs > 3):
                self.before(args)
                raise ValueError("planted")
            values = [*args]
            args.clear()
            return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def results(fn: Callable[[Tensor, Tensor], Any], backend: Any, runs: int = 4, **options: Any) -> list[Tensor]:
    """Of some runs of `fn`, whose inputs only the list holds."""
    a, b = torch.ones(2, 3), torch.full((2, 3), 2.0)
    code = compile_fallible(find_backend(backend), make_fx(fn)(a, b), [a, b], **options)
    return [code([a + number, b + number])[0] for number in range(runs)]


def product(a: Tensor, b: Tensor) -> tuple[Tensor]:
    return ((a * b).sin(),)


def unpack(args: list[Any]) -> None:
    """As generated code does: the list is empty, local variables hold what was in it."""
    _held = tuple(args)
    args.clear()
    raise ValueError("planted")


def half_way(args: list[Any]) -> None:
    _held = args[0]
    args.clear()
    raise ValueError("planted")


def changing(args: list[Any]) -> None:
    args[0].add_(1)


@pytest.mark.parametrize("before", [unpack, list.copy])
def test_the_graph_is_interpreted_where_its_inputs_are_there(before: Before) -> None:
    backend = Third(before)
    expected = [product(torch.ones(2, 3) + n, torch.full((2, 3), 2.0) + n)[0] for n in range(4)]
    assert all(map(torch.equal, results(product, backend), expected))
    assert (backend.runs, retrograd.counters["run_failures"]) == (4, 1)
    assert [reason.code for reason in retrograd.explain().fallbacks] == ["code-failed"]


@pytest.mark.parametrize("before", [half_way, changing, list.clear])
def test_an_input_that_is_gone_or_changed_leaves_the_error_to_the_caller(before: Before) -> None:
    with pytest.raises(ValueError, match="planted"):
        results(product, Third(before))


def test_an_error_in_strict_mode_is_for_the_caller() -> None:
    with pytest.raises(ValueError, match="planted"):
        results(product, Third(unpack), strict=True)


def drawn(args: list[Any]) -> None:
    torch.rand(3)
    unpack(args)


def test_numbers_are_drawn_again_from_the_same_state() -> None:
    def noisy(a: Tensor, b: Tensor) -> tuple[Tensor]:
        return (torch.rand_like(a) * b,)

    torch.manual_seed(0)
    found = results(noisy, Third(drawn))
    torch.manual_seed(0)
    assert all(map(torch.equal, found, results(noisy, "aten")))


def test_code_that_keeps_failing_is_given_up() -> None:
    backend = Third(unpack, always=True)
    results(product, backend, 8)
    assert backend.runs == 4


def test_an_error_of_the_first_run_is_for_the_caller() -> None:
    backend = Third(unpack)
    backend.runs = 2
    with pytest.raises(ValueError, match="planted"):
        results(product, backend)


class FailingInductor(InductorBackend):
    """Inductor, whose code is wrapped by that of `Third`."""

    def compile(self, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        code = super().compile(gm, *args, **kwargs)
        return Third(unpack)(lambda *values: code([*values]), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["live", "compile"])
def test_training_goes_on_where_code_fails_in_its_third_run(way: str) -> None:
    retrograd.reset()
    torch._dynamo.reset()
    expected = losses("eager", None, steps=6)
    torch.testing.assert_close(losses(way, FailingInductor(), steps=6), expected)
    assert retrograd.counters["run_failures"] >= 1
    assert {reason.code for reason in retrograd.explain().fallbacks} == {"code-failed"}
