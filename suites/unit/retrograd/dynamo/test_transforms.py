"""Graphs of Dynamo with transforms of `torch.func` in them, which cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrograd

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vjp": lambda f, t: torch.func.vjp(f, t)[1](t[:, :2])[0],
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (t,))[1],
    "jacrev": lambda f, t: torch.func.jacrev(f)(t),
    "jacfwd": lambda f, t: torch.func.jacfwd(f)(t),
    "vmap": lambda f, t: torch.func.vmap(lambda u: f(u.expand(2, -1)))(t.expand(3, -1)),
    "jvp inside of grad": lambda f, t: torch.func.grad(lambda u: torch.func.jvp(f, (u,), (u,))[1].sum())(t),
}


#: what the reason names: under torch 2.11 an assertion of the transform comes first.
REASON = r"dynamicLayerStack|layer\.key" if torch.__version__.startswith("2.11.") else "bilinear"


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_in_which_the_capture_fails_is_left(name: str) -> None:
    weight = torch.randn(2, 3, 3)

    def refused(t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.bilinear(t, t, weight).float()

    def run(t: torch.Tensor) -> torch.Tensor:
        return TRANSFORMS[name](refused, t) * 2

    t = torch.randn(1, 3)
    with pytest.warns(retrograd.FallbackWarning, match=REASON):
        found = torch.compile(run, backend="retrograd", options={"backend": "eager"})(t)
    torch.testing.assert_close(found, run(t), rtol=0, atol=0)
    assert torch._C._functorch.maybe_current_level() is None
    assert torch.autocast_increment_nesting() == 1, "casts of weights would be kept for good"
    torch.autocast_decrement_nesting()
    assert torch._C._is_fwd_grad_enabled()
    torch.testing.assert_close(torch.func.jvp(torch.sin, (t,), (t,))[1], t.cos() * t)
