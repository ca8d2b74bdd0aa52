"""After an error in a backward, of the graph is left what eager leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import retrograd


def outcome(context: Callable[[], AbstractContextManager[Any]], place: str) -> list[Any]:
    w = torch.full((2,), 0.5, requires_grad=True)
    first = w.sigmoid()
    second = first.exp()
    third = second.tanh()
    loss = third.sum()
    errors = [FloatingPointError("too large")]

    def check(*_: Any) -> None:
        if errors:
            raise errors.pop()

    register: dict[str, Callable[..., Any]] = {
        "root": loss.register_hook,
        "middle": second.register_hook,
        "before": third.grad_fn.register_prehook,  # type: ignore[union-attr]
        "after": third.grad_fn.register_hook,  # type: ignore[union-attr]
        "leaf": w.register_hook,
        "accumulated": w.register_post_accumulate_grad_hook,
    }
    register[place](check)
    found: list[Any] = []
    for _ in range(2):
        try:
            with context():
                loss.backward()
        except (FloatingPointError, RuntimeError) as error:
            found.append(str(error))
        for tensor in (first, second, third):
            try:
                found.append(tensor.grad_fn._saved_result is not None)
            except RuntimeError:
                found.append("released")
        found.append(None if w.grad is None else w.grad.tolist())
    return found


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("place", ["root", "middle", "before", "after", "leaf", "accumulated"])
def test_a_check_that_raises_leaves_what_eager_leaves(place: str, backend: str) -> None:
    expected = outcome(contextlib.nullcontext, place)
    for _ in range(3):
        assert outcome(lambda: retrograd.compiled_autograd(backend), place) == expected
