"""Code whose results are laid out as they were traced.

In: a boxed callable and fakes of its results. Out: the same, with copies of those results that come in other
strides: a code generator may pad a matrix product and give a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Boxed = Callable[[list[Any]], Sequence[Any]]


def with_strides(run: Boxed, fakes: Sequence[Any]) -> Boxed:
    """`run`, whose results have the strides of `fakes`, where these are static. It is always the same results
    that do not: they are looked for in the first call."""
    places: list[int] | None = None

    def run_with_strides(args: list[Any]) -> Sequence[Any]:
        nonlocal places
        results = run(args)
        if places is None:
            places = [i for i, fake in enumerate(fakes) if _differs(fake, results[i])]
        if not places:
            return results
        made = [*results]
        for i in places:
            made[i] = torch.empty_strided(
                made[i].shape, fakes[i].stride(), dtype=made[i].dtype, device=made[i].device
            ).copy_(made[i])
        return made

    return run_with_strides


def _differs(fake: Any, result: Any) -> bool:
    if not isinstance(fake, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if any(isinstance(number, torch.SymInt) for number in (*fake.shape, *fake.stride())):
        return False
    return fake.shape == result.shape and fake.stride() != result.stride()
