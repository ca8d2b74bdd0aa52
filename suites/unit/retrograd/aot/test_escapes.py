"""Tensors of a capture that user code would keep."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd import CaptureError, aot

_table: Tensor | None = None
_tables: dict[int, Tensor] = {}


def sets_a_global(x: Tensor) -> Tensor:
    """Makes a table once."""
    global _table
    if _table is None:
        _table = torch.arange(3.0)
    return x * _table


def fills_a_global(x: Tensor) -> Tensor:
    """Makes a table for each length."""
    return x * _tables.setdefault(len(x), torch.arange(3.0))


def helper(x: Tensor) -> Tensor:
    """What another function calls."""
    return fills_a_global(x)


def counts(x: Tensor) -> Tensor:
    """Keeps a tensor as an attribute of itself."""
    counts.last = x.detach() * 2  # type: ignore[attr-defined]
    return x * 3


class Keeping(nn.Module):
    """Has a dictionary in which it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self._kept["x"] = x * 2
        return x + 1


CASES = [
    (sets_a_global, "_table of the global variables"),
    (fills_a_global, "3 of a dictionary"),
    (lambda x: helper(x), "3 of a dictionary"),
    (counts, "last of counts"),
    (Keeping(), "x of a dictionary"),
    (functools.partial(Keeping().forward), "x of a dictionary"),
]


@pytest.mark.parametrize(("fn", "place"), CASES)
def test_what_would_be_kept_is_named_and_put_back(fn: Callable[[Tensor], Tensor], place: str) -> None:
    call = aot.module(fn, strict=True) if isinstance(fn, nn.Module) else aot.function(fn, strict=True)
    with pytest.raises(CaptureError, match=f"sets {place}"):
        call(torch.ones(3))
    assert _table is None
    assert not _tables
    assert not hasattr(counts, "last")
    assert not getattr(fn, "_kept", None)


def test_a_cache_is_emptied_and_the_function_compiled() -> None:
    @functools.lru_cache(None)
    def table(count: int) -> Tensor:
        return torch.arange(float(count))

    call = aot.function(lambda x: x * table(3), backend="eager", strict=True)
    assert torch.equal(call(torch.ones(3)), table(3))
    assert table(3).add(1).tolist() == [1, 2, 3]


def test_what_is_kept_without_a_tensor_is_the_functions_own_business() -> None:
    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x * 2

    assert aot.function(fn, backend="eager", strict=True)(torch.ones(3)).tolist() == [2, 2, 2]
    assert seen


def test_recurrent_layers_gather_their_weights_anew() -> None:
    layer = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    expected = layer(x)[0]
    torch.testing.assert_close(aot.module(layer, backend="eager", strict=True)(x)[0], expected)
    assert torch.equal(layer(x)[0], expected)


def test_nothing_is_drawn_while_the_package_is_imported() -> None:
    code = """
import torch
torch.manual_seed(3)
before = torch.get_rng_state()
import retrograd, retrograd.aot
with retrograd.compiled_autograd("eager"):
    torch.ones(1, requires_grad=True).sum().backward()
retrograd.aot.function(lambda x: x * 2, backend="eager")(torch.ones(3))
print(torch.equal(before, torch.get_rng_state()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
