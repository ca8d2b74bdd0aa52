"""Results without history: strides, and what autograd says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retrograd
from retrograd import aot

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning", "ignore::UserWarning")
WAYS = {
    "aot": lambda fn: aot.function(fn, backend="eager"),
    "aten": lambda fn: aot.function(fn, backend="aten"),
    "compile": lambda fn: retrograd.compile(fn, backend="eager"),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x[:, :1].view(1, 1),
    "of_a_chunk": lambda x: (lambda part: part.view(part.shape))(x.chunk(2, 1)[1]),
    "reshape": lambda x: x[:, :1].reshape(1, 1, 1),
    "unflatten": lambda x: x[:, :1].unflatten(0, (1, 1)),
    "view_as": lambda x: (lambda part: part.view_as(part))(x[:, :1]),
    "row": lambda x: x[:, :1].view(-1),
}


@ways
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("fn", VIEWS.values(), ids=VIEWS)
def test_a_view_with_dimensions_of_size_one_has_eagers_strides(
    fn: Callable[[Tensor], Tensor], requires_grad: bool, way: Callable[..., Any]
) -> None:
    x = torch.randn(1, 2, requires_grad=requires_grad)
    fast = way(fn)
    for _ in range(2):
        wanted, found = fn(x), fast(x)
        assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset())
        assert found._base is x


#: Functions whose kernels return views of memory that nobody else knows, and that are no views in eager.
KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0]]), x),
    "stack": lambda x: torch.stack([x, x]),
    "repeat": lambda x: x.repeat(2, 3),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "pad": lambda x: F.pad(x[None], (1, 1), mode="circular"),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(3, 2, 1)),
    "quantile": lambda x: x.quantile(0.3),
    "vector": lambda x: torch.ones(2) @ x,
}


@ways
@pytest.mark.parametrize("fn", KERNELS.values(), ids=KERNELS)
def test_what_is_no_view_in_eager_is_none(fn: Callable[[Tensor], Any], way: Callable[..., Any]) -> None:
    fast, x = way(fn), torch.randn(2, 4)
    for _ in range(2):
        wanted, found = (one if isinstance(one, tuple) else (one,) for one in (fn(x), fast(x)))
        for result, like in zip(found, wanted, strict=True):
            assert torch.equal(result, like)
            assert not result._is_view()
            result.detach_()
        found[-1].mul_(torch.ones((), requires_grad=True))  # the first one has no part in it
        assert [result.requires_grad for result in found] == [*([False] * (len(found) - 1)), True]


def test_a_view_of_what_is_not_returned_stays_one() -> None:
    fast = aot.function(lambda x: (x * 2).view(-1), backend="eager")
    assert [fast(torch.ones(2, 2))._is_view() for _ in range(2)] == [True, True]


WRITERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul": lambda x, out: torch.mul(x, 2, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "sort": lambda x, out: torch.sort(x, out=(out, torch.empty(0, dtype=torch.long))),
    "sum": lambda x, out: torch.sum(x, 0, keepdim=True, out=out),
}


@pytest.mark.parametrize("size", [0, 1, 3, 6, 8])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_an_out_argument_of_another_size_is_resized(write: Callable[..., Any], size: int) -> None:
    def seen(compiled: bool) -> list[Any]:
        def fn(x: Tensor, out: Tensor) -> Tensor:
            write(x, out)
            return out + 1

        call = aot.function(fn, backend="eager") if compiled else fn
        found: list[Any] = []
        for number in range(2):
            out = torch.zeros(size)
            found += [call(torch.arange(3.0) + number, out).tolist(), out.tolist(), out._version]
        return found

    assert seen(True) == seen(False)


@ways
def test_an_out_argument_keeps_its_strides(way: Callable[..., Any]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(3, 2).t()
        torch.mul(x, torch.ones(2, 1), out=out)
        return out, out * 2

    wanted, found = fn(torch.ones(3)), way(fn)(torch.ones(3))
    assert [one.stride() for one in found] == [one.stride() for one in wanted]
