"""Segments whose decompositions create tensors are traced, also with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.backends.registry import find_backend
from retrograd.trace import trace

aten = torch.ops.aten

CREATES: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: aten.select_backward(x[0], x.shape, 0, 1),
    "diagonal": lambda x: aten.diagonal_backward(x[0], [x.shape[1], x.shape[1]], 0, 0, 1),
    "full": lambda x: torch.full(x.shape, 2.0) * x,
}


@pytest.mark.parametrize("symbolic", [None, {0: frozenset({1})}], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CREATES)
def test_a_decomposition_creates_a_tensor(name: str, symbolic: dict[int, frozenset[int]] | None) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        return (CREATES[name](*args),)

    traced = trace(fn, [torch.ones(4, 6)], symbolic, find_backend("inductor").decompositions())
    x = torch.randn(4, 6 if symbolic is None else 9)
    (result,) = traced.gm(x)
    assert torch.equal(result, CREATES[name](x))
