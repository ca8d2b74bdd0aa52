"""Large inputs of functions compiled ahead that are gone, or changed, when a second derivative is asked for.

In: a probe, whose `compile` is the identity for eager. Out: gradients and gradients of gradients. Eager keeps
what its nodes saved; of an input that none of them saved, it needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "higher-order")
SIDE = 512  #: an input takes a MiB.

#: what is made of the input first: eager saves nothing of it.
HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked": lambda x, other: x.masked_fill(other > 0, 0.5),
    "added": lambda x, other: x + other,
    "turned and cast": lambda x, other: x.t().double(),
    "indexed": lambda x, other: x[torch.arange(SIDE).flip(0)],
    "joined": lambda x, other: torch.cat([x, other])[:SIDE],
    "itself": lambda x, other: x,
}
#: what is made of that: eager saves what goes in, or what comes out.
TAILS: dict[str, Callable[[Tensor], Any]] = {
    "exponential": lambda z: z.exp(),
    "a part": lambda z: z[:, : SIDE // 2].exp(),
    "bounded": lambda z: z.clamp(0, 1),
    "two results": lambda z: (z * 2, z.relu()),
    "changed inside": lambda z: z.clone().mul_(2).exp(),
}


def _differentiate_twice(p: Probe, name: str, run: Callable[..., Any], changes: bool) -> None:
    """Call `run` with an input that has a history; let go of it, or change it; differentiate twice."""
    leaf, other = p.leaf(name, p.randn(SIDE, SIDE, requires_grad=True)), p.randn(SIDE, SIDE)
    inner = leaf * 1
    results = p.compile(run)(inner, other)
    if changes:
        inner.detach().zero_()
    del inner
    outs = results if isinstance(results, tuple) else (results,)
    with p.backward():
        (grad,) = torch.autograd.grad([out.square().mean() for out in outs], leaf, create_graph=True)
        p.value("first", grad.detach())
        (grad * 1e3).sin().mean().backward()


@scenario(tags=TAGS)
def aot_second_derivative_without_the_input(p: Probe) -> None:
    """Whatever is made of an input, nobody holds it any more when the second derivative is made."""
    for before, head in HEADS.items():
        for behind, tail in TAILS.items():

            def run(x: Tensor, other: Tensor, parts: Any = (head, tail)) -> Any:
                return parts[1](parts[0](x, other))

            _differentiate_twice(p, f"{before}, {behind}", run, changes=False)


@scenario(tags=(*TAGS, "in-place"))
def aot_second_derivative_after_the_input_changed(p: Probe) -> None:
    """An input of which eager saved nothing is changed; the second derivative is what it was."""
    for before in ("masked", "added", "indexed", "joined"):

        def run(x: Tensor, other: Tensor, head: Any = HEADS[before]) -> Tensor:
            return head(x, other).exp()

        _differentiate_twice(p, before, run, changes=True)


@scenario(tags=(*TAGS, "hooks"))
def aot_hooks_of_an_input_that_is_gone(p: Probe) -> None:
    """A hook on the input sees its gradient in both backwards."""
    leaf, other = p.leaf("x", p.randn(SIDE, SIDE, requires_grad=True)), p.randn(SIDE, SIDE)
    inner = leaf * 1
    inner.register_hook(p.hook("inner"))
    out = p.compile(lambda x, y: x.masked_fill(y > 0, 0.5).exp())(inner, other)
    del inner
    with p.backward():
        (grad,) = torch.autograd.grad(out.mean(), leaf, create_graph=True)
        (grad * 1e3).sin().mean().backward()


@scenario(tags=(*TAGS, "retain"))
def aot_graph_kept_of_an_input_that_is_gone(p: Probe) -> None:
    """Of one call: a gradient, a differentiable gradient, its gradient, and the first one once more."""
    leaf, other = p.leaf("x", p.randn(SIDE, SIDE, requires_grad=True)), p.randn(SIDE, SIDE)
    out = p.compile(lambda x, y: (x + y).exp())(leaf * 1, other).square().mean()
    with p.backward():
        (first,) = torch.autograd.grad(out, leaf, retain_graph=True)
        (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
        (grad * 1e3).sin().mean().backward(retain_graph=True)
        (again,) = torch.autograd.grad(out, leaf)
    p.value("gradients", (first, grad.detach(), again))
