"""What a backward frees on its way.

In: a probe. Out: which saved tensors and graph nodes are still alive when each hook runs.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


@scenario(tags=("memory", "hooks"), issue="pytorch#122353")
def saved_activations_are_freed_on_the_way(p: Probe) -> None:
    """Once a node has run, the activation that it saved is freed, while earlier ones are still alive."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    alive: list[weakref.ref[Tensor]] = []
    h = x
    for i in range(4):
        inner = h * 2
        alive.append(weakref.ref(inner))
        h = inner.sin()
        h.register_hook(p.hook(f"h{i}", lambda g: p.event("alive", sum(ref() is not None for ref in alive))))
        del inner
    loss = h.sum()
    del h
    with p.backward():
        loss.backward()
    p.event("alive", sum(ref() is not None for ref in alive))


class Packed:
    """A holder that can be watched by a weak reference."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@scenario(tags=("memory", "hooks", "saved"), issue="pytorch#122353")
def packed_tensors_are_freed_on_the_way(p: Probe) -> None:
    """What pack returned is dropped as soon as its node has run, unless the graph is retained."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    alive: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        alive.append(weakref.ref(packed))
        return packed

    def look(*args: Any) -> None:
        p.event("alive", sum(ref() is not None for ref in alive))

    h = x
    with saved_tensors_hooks(pack, lambda packed: packed.tensor):
        for i in range(3):
            h = h.sin()
            h.register_hook(p.hook(f"h{i}", look))
    x.register_hook(p.hook("x", look))
    with p.backward():
        h.sum().backward(retain_graph=True)
        h.sum().backward()


@scenario(tags=("memory", "hooks"))
def gradients_are_freed_on_the_way(p: Probe) -> None:
    """A gradient that nobody keeps is freed once the nodes below it have run."""
    x = p.leaf("x", p.randn(4, requires_grad=True))
    alive: list[weakref.ref[Tensor]] = []

    def watch(grad: Tensor) -> None:
        p.event("alive", sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(grad))

    h = x
    for i in range(4):
        h = h.sin()
        h.register_hook(p.hook(f"h{i}", watch))
    with p.backward():
        h.sum().backward()
