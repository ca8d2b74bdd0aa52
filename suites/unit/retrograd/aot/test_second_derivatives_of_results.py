"""A second derivative through a compiled function also reaches the results that the function's nodes save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd
from retrograd import aot

Results = tuple[Tensor, ...]


def two(x: Tensor, w: Tensor) -> Results:
    y = torch.tanh(x @ w)
    return y, torch.sigmoid(y * w.sum())  # the second one's nodes save the first


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Results]] = {
    "saved by its own node": lambda x, w: (torch.exp(x * w.sum()),),
    "of a sum": lambda x, w: (torch.softmax(x @ w, 1),),
    "saved by another node": two,
    "an argument of another": lambda x, w: (a := x * 2, a * w.sum()),
    "returned twice": lambda x, w: (y := torch.exp(x * w.sum()), y),
    "with a view of it": lambda x, w: (y := torch.exp(x + w), y.t()),
    "two of one node": lambda x, w: (*torch.linalg.qr(x @ w + 3 * torch.eye(3)),),
    "not saved": lambda x, w: (torch.exp(x) * 1 + w,),
}


def seen(
    fn: Callable[..., Results],
    use: Callable[[Results, Sequence[Tensor], Sequence[Tensor]], Any],
    scale: int = 1,
    retains: bool = False,
) -> list[Any]:
    """What hooks on the results get, what `use` returns, and all gradients."""
    torch.manual_seed(0)
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    results, log = fn(x, w), []

    def hook(place: int) -> Callable[[Tensor], Tensor]:
        def called(grad: Tensor) -> Tensor:
            log.append((place, grad.detach().clone()))
            return grad * scale

        return called

    for place, result in enumerate(results):
        result.register_hook(hook(place))
        if retains:
            result.retain_grad()
    total = torch.stack([result.square().sum() for result in results]).sum()
    slopes = torch.autograd.grad(total, (x, w), create_graph=True)
    found = use(results, slopes, (x, w))
    kept = [result.grad for result in results] if retains else []
    return [*log, found, *kept, x.grad, w.grad]


def penalty(results: Results, slopes: Sequence[Tensor]) -> Tensor:
    return torch.stack([slope.square().sum() for slope in slopes]).sum() + sum(
        (result * 3).sum() for result in results
    )


USES: dict[str, Callable[[Results, Sequence[Tensor], Sequence[Tensor]], Any]] = {
    "with the results": lambda results, slopes, _: penalty(results, slopes).backward(),
    "alone": lambda _, slopes, __: slopes[0].sum().backward(),
    "asked for": lambda results, slopes, given: torch.autograd.grad(
        penalty(results, slopes), (*results, *given), allow_unused=True
    ),
    "asked for alone": lambda results, slopes, given: torch.autograd.grad(
        slopes[0].sum(), (*results, given[0]), allow_unused=True
    ),
    "twice": lambda results, slopes, _: [
        penalty(results, slopes).backward(retain_graph=keep) for keep in (True, False)
    ],
}


def compiled(fn: Callable[..., Results], way: str) -> Callable[..., Results]:
    if way == "aot":
        return aot.function(fn, backend="eager")
    torch._dynamo.reset()
    return retrograd.compile(fn, backend="eager")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("use", "way"), [*((use, "aot") for use in USES), ("with the results", "compile")])
@pytest.mark.parametrize(
    ("scale", "retains"), [(1, False), (2, True)], ids=["looks", "changes what is retained"]
)
def test_its_hooks_and_who_asks_see_the_whole_gradient(
    name: str, use: str, scale: int, retains: bool, way: str
) -> None:
    fn = FUNCTIONS[name]
    wanted = seen(fn, USES[use], scale, retains)
    assert len(wanted) > 3  # some hook was called
    torch.testing.assert_close(seen(compiled(fn, way), USES[use], scale, retains), wanted, rtol=0, atol=0)


def test_a_hook_on_a_result_that_is_gone_does_not_break_it() -> None:
    x, log = torch.ones(3, requires_grad=True), []

    def slope(fn: Callable[[Tensor], Tensor]) -> Tensor:
        y = fn(x)
        y.register_hook(lambda grad: log.append(grad))
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    for fn in (torch.exp, aot.function(torch.exp, backend="eager")):
        (found,) = torch.autograd.grad(slope(fn).sum(), x)
        assert torch.equal(found, torch.ones(3).exp())


def test_a_result_that_was_changed_in_place_is_no_result_any_more() -> None:
    found = []
    for fn in (torch.mul, aot.function(torch.mul, backend="eager")):
        x, w = (torch.full((3,), n, requires_grad=True) for n in (2.0, 3.0))
        y = fn(x, w)
        y.add_(1).register_hook(found.append)
        slopes = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        (y.sum() + sum(slope.sum() for slope in slopes)).backward()
        found += [x.grad, w.grad]
    assert len(found) == 8
    assert all(map(torch.equal, found[:4], found[4:]))
