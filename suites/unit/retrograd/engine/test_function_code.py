"""What the code of a backward tells of its effects: those that outlive it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from retrograd.engine import why_backward_has_effects

SEEN: list[int] = []
count = 0


class Holder:
    last: Any = None


HOLDER = Holder()


def counts_on_its_context(ctx: Any, grad: Any) -> Any:
    ctx.calls += 1
    ctx.last = grad
    return grad * ctx.calls


def sums_by_a_generator(ctx: Any, grad: Any) -> Any:
    return sum(grad * factor for factor in ctx.factors)


def fills_its_own_list(ctx: Any, grad: Any) -> Any:
    import math

    found = []
    found.append(grad * math.pi)
    return found[0]


def fills_a_list(ctx: Any, grad: Any) -> Any:
    SEEN.append(1)
    return grad


def counts_globally(ctx: Any, grad: Any) -> Any:
    global count
    count += 1
    return grad


def keeps_elsewhere(ctx: Any, grad: Any) -> Any:
    HOLDER.last = grad
    return grad


def counts_elsewhere(ctx: Any, grad: Any) -> Any:
    HOLDER.last += 1
    return grad


def made_of(backward: Callable[..., Any], once: bool) -> type[Function]:
    made = once_differentiable(backward) if once else backward
    return type("Made", (Function,), {"backward": staticmethod(made)})


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("backward", [counts_on_its_context, sums_by_a_generator, fills_its_own_list])
def test_what_stays_inside(backward: Callable[..., Any], once: bool) -> None:
    assert why_backward_has_effects(made_of(backward, once)) is None


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (fills_a_list, "changes a container"),
        (counts_globally, "changes a global"),
        (keeps_elsewhere, "sets attributes"),
        (counts_elsewhere, "sets attributes"),
    ],
)
def test_what_outlives_it(backward: Callable[..., Any], once: bool, expected: str) -> None:
    assert expected in str(why_backward_has_effects(made_of(backward, once)))
