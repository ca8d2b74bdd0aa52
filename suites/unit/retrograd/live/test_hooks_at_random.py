"""Programs whose hooks add and remove hooks at random, against eager.

In: a seed. A program is a graph with nodes of several outputs, and hooks of every kind that register further
hooks, remove some, or call `retain_grad`. Every tensor has a hook from the beginning: eager does not define
what happens if the first hook of an output is registered while those of another output of its node run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd


def _values(tensors: Any) -> Any:
    return [None if one is None else one.tolist() for one in tensors]


class _Program:
    """One program. `events` are its hook calls, in order, and what it returns."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: list[Any] = []
        self.tensors: list[Tensor] = [torch.tensor([1.0 + i, 2.0], requires_grad=True) for i in range(2)]
        self.handles: list[Any] = []
        for _ in range(self.random.randint(2, 5)):
            self._operation()
        for _ in range(self.random.randint(2, 6)):
            self._register(self.random.randrange(len(self.tensors)), "", 0)
        for i, tensor in enumerate(self.tensors):
            tensor.register_hook(lambda grad, i=i: self._note(f"{i} own", [grad]))

    def _operation(self) -> None:
        one, other = self.random.choice(self.tensors), self.random.choice(self.tensors)
        made: list[Callable[[], Any]] = [
            lambda: [one.sin()],
            lambda: [one * other],
            lambda: [one + other],
            lambda: torch.stack([one * 2, one * 3]).unbind(0),
        ]
        self.tensors += self.random.choice(made)()

    def _note(self, name: str, grads: Any) -> None:
        self.events.append((name, _values(grads)))

    def _register(self, place: int, name: str, depth: int) -> None:
        tensor, kind = self.tensors[place], self.random.choice(["tensor", "tensor", "pre", "post"])
        name, factor = f"{name} {place} {kind}", self.random.choice([None, 2.0])

        def of_tensor(grad: Tensor | None) -> Tensor | None:
            self._note(name, [grad])
            self._act(name, depth)
            return None if factor is None or grad is None else grad * factor

        def of_node(*grads: Any) -> None:
            self._note(name, grads[0])
            self._act(name, depth)

        def of_leaf(leaf: Tensor) -> None:
            self._note(name, [leaf.grad])
            self._act(name, depth)

        if kind == "tensor":
            self.handles.append(tensor.register_hook(of_tensor))
        elif tensor.grad_fn is None:
            self.handles.append(tensor.register_post_accumulate_grad_hook(of_leaf))
        elif kind == "pre":
            self.handles.append(tensor.grad_fn.register_prehook(of_node))
        else:
            self.handles.append(tensor.grad_fn.register_hook(of_node))

    def _act(self, name: str, depth: int) -> None:
        if depth == 2 or self.random.random() < 0.3:
            return
        for _ in range(self.random.randint(1, 2)):
            action, place = self.random.randrange(4), self.random.randrange(len(self.tensors))
            if action == 0 and self.handles:
                self.handles.pop(self.random.randrange(len(self.handles))).remove()
            elif action == 1:
                self.tensors[place].retain_grad()
            else:
                self._register(place, f"{name} +", depth + 1)

    def run(self) -> list[Any]:
        total = sum((tensor * (i + 1)).sum() for i, tensor in enumerate(self.tensors[-3:]))
        assert isinstance(total, Tensor)
        for keep in (True, False):
            total.backward(retain_graph=keep)
            self.events.append("over")
        return [*self.events, _values(t.grad for t in self.tensors if t.is_leaf or t.retains_grad)]


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_hooks_that_change_hooks_at_random(backend: str) -> None:
    for seed in range(40):
        expected = _Program(seed).run()
        with retrograd.compiled_autograd(backend=backend):
            found = _Program(seed).run()
        assert found == expected, f"seed {seed}"
