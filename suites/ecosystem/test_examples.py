"""The examples train as in eager: equal parameters, hooks in eager's order, only listed fallbacks.

Needs their libraries: `nox -s ecosystem`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

for library in ("accelerate", "e3nn", "lightning", "opacus", "trl"):
    pytest.importorskip(library, reason=f"{library} is not in the shared environment: nox -s ecosystem")

import retrograd  # noqa: E402 - only where the libraries are
from ecosystem.gains import EXAMPLES, IN_PLACE  # noqa: E402

EAGER = {"backend": "eager"}
#: what `retrograd.compile` may leave to eager: a second derivative runs the function again.
FALLBACKS = {"forces": {"backwards-rerun"}}
#: examples whose code takes another branch while Dynamo traces, so that rounding differs, also under stock.
OTHER_BRANCH = {"trainer": 1e-6, "sft": 1e-9}


def trained(example: str, prepare: Callable[[Any], Any] = lambda model: model) -> tuple[nn.Module, list[str]]:
    """The model after training, and the names of its parameters in the order in which their hooks ran."""
    module = importlib.import_module(f"ecosystem.{example}")
    events: list[str] = []

    def hooked(model: nn.Module) -> Any:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        return prepare(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say to each other
        return module.train(hooked), events


def compiled(example: str) -> Callable[[nn.Module], Any]:
    """What compiles the model of an example by Dynamo, as its page says, with eager's own kernels."""

    def in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="retrograd", options=EAGER)
        return model

    return in_place if example in IN_PLACE else lambda model: retrograd.compile(model, **EAGER)


def worst(model: nn.Module, eager: nn.Module) -> float:
    """The largest difference between parameters of two models."""
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs if one.numel())


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    retrograd.reset()
    torch._dynamo.reset()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_live_path_trains_as_eager_does(example: str) -> None:
    eager, order = trained(example)
    with retrograd.compiled_autograd(**EAGER) as context:
        model, found = trained(example)
    assert found == order != []
    assert worst(model, eager) == 0.0
    report = context.explain()
    assert report.backwards
    assert [reason.code for reason in report.fallbacks] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_compiled_model_trains_as_eager_does(example: str) -> None:
    eager, order = trained(example)
    model, found = trained(example, compiled(example))
    assert found == order
    assert worst(model, eager) <= OTHER_BRANCH.get(example, 0.0)
    report = retrograd.explain()
    assert report.graphs
    assert {reason.code for reason in report.fallbacks} <= FALLBACKS.get(example, set())
