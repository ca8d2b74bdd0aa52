"""A run of Python that the trace abandons counts for nothing, even if the function catches everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd import CaptureError, aot

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning", "ignore::UserWarning")


def bare_except(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except:  # noqa: E722
        return -7.0


def returns_in_finally(read: Callable[[], Any]) -> Any:
    found = -7.0
    try:
        found = read()
    finally:
        return found  # noqa: B012


def suppresses(read: Callable[[], Any]) -> Any:
    found = -7.0
    with contextlib.suppress(BaseException):
        found = read()
    return found


CATCHES = [bare_except, returns_in_finally, suppresses]


@pytest.mark.parametrize("given", [list, dict], ids=["list", "dict"])
@pytest.mark.parametrize("catch", CATCHES)
def test_what_an_abandoned_run_does_is_not_done(catch: Callable[..., Any], given: Any) -> None:
    def seen(compiled: bool) -> list[Any]:
        counts = torch.zeros(2)

        def fn(held: Any, x: Tensor) -> Tensor:  # a container as argument: the run cannot go on in eager
            number = catch(lambda: x.sum().item())
            counts.add_(1)
            return x * number + counts

        call = aot.function(fn, backend="eager") if compiled else fn
        found: list[Any] = []
        for _ in range(3):
            x = torch.arange(2.0, requires_grad=True)
            y = call(given(), x)
            y.sum().backward()
            found += [y.tolist(), x.grad.tolist(), counts.tolist(), counts._version]  # type: ignore[union-attr]
        return found

    assert seen(True) == seen(False)


def test_the_argument_parser_may_catch_it_too() -> None:
    edges = [torch.arange(3.0), torch.arange(4.0)]
    x = torch.tensor([[0.5, 0.5], [1.5, 2.5]])
    fast = aot.function(torch.histogramdd, backend="eager")
    for _ in range(2):
        assert fast(x, edges).hist.tolist() == torch.histogramdd(x, edges).hist.tolist()


def attention() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.MultiheadAttention(4, 2, batch_first=True), (torch.randn(2, 5, 4),) * 3


def layer() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (torch.randn(2, 5, 4),)


def encoder() -> tuple[nn.Module, tuple[Any, ...]]:
    inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    return nn.TransformerEncoder(inner, 2), (torch.randn(2, 3, 4), None, padding)


@pytest.mark.parametrize("frozen", [False, True], ids=["no_grad", "frozen"])
@pytest.mark.parametrize("make", [attention, layer, encoder])
def test_attention_takes_eagers_path_in_inference(make: Callable[[], Any], frozen: bool) -> None:
    torch.manual_seed(0)
    module, args = make()
    module.eval().requires_grad_(not frozen)
    fast = aot.module(module, backend="eager")
    with torch.set_grad_enabled(frozen):
        for _ in range(2):
            wanted, found = (
                one[0] if isinstance(one, tuple) else one for one in (module(*args), fast(*args))
            )
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()


def test_a_stage_refuses_attention_in_inference() -> None:
    module, args = layer()
    with torch.no_grad(), pytest.raises(CaptureError, match="fast path"):
        aot.capture(aot.create_state(module.eval(), args))


def test_attention_that_is_trained_is_compiled() -> None:
    module, args = layer()
    aot.module(module.eval(), backend="eager", strict=True)(*args).sum().backward()
