"""What a backward does besides computing gradients, where compiled code might do it once, or never.

In: a probe, whose `compile` is the identity for eager. Out: tensors, containers and random numbers that a
backward changes: a Function's, or that of a checkpoint, which runs its function again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "function")

Change = Callable[[Any, Tensor, Tensor], Tensor]
"""Is given the context, the gradient and another leaf; returns what the gradient becomes."""


class Changing(torch.autograd.Function):
    """Its backward does what it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, change: Change) -> Tensor:
        ctx.other, ctx.change, ctx.seen, ctx.notes = other, change, [], {"runs": 0}
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(ctx, grad, ctx.other), None, None


def _in_place(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    return grad.mul_(3)


def _through_a_view(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    grad.t()[0] = 0
    return grad


def _to_another_grad(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    other.grad = torch.ones_like(other) if other.grad is None else other.grad + 1
    return grad


def _by_a_backward_of_its_own(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    with torch.enable_grad():
        (other * grad).sum().backward()
    return grad


def _a_list_on_its_context(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    ctx.seen.append(1)
    return grad * len(ctx.seen)


def _a_dictionary_on_its_context(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
    ctx.notes["runs"] += 1
    return grad * ctx.notes["runs"]


#: what a backward changes.
CHANGES: dict[str, Change] = {
    "its_gradient": _in_place,
    "its_gradient_through_a_view": _through_a_view,
    "the_grad_of_another_leaf": _to_another_grad,
    "gradients_by_a_backward_of_its_own": _by_a_backward_of_its_own,
    "a_list_on_its_context": _a_list_on_its_context,
    "a_dictionary_on_its_context": _a_dictionary_on_its_context,
}


def _register_change(name: str) -> None:
    def body(p: Probe) -> None:
        x, w = (p.leaf(key, p.randn(3, 3, requires_grad=True)) for key in "xw")
        call = p.compile(lambda a, b: (Changing.apply(a.sin(), b, CHANGES[name]) + b).cos().sum())
        for step in range(3):
            out = call(x, w)
            with p.backward():
                out.backward(retain_graph=True)
            p.value(f"grads{step}", (x.grad, w.grad))
            with p.backward():
                out.backward()

    body.__name__ = f"backward_changes_{name}"
    body.__doc__ = f"The backward of a Function changes {name.replace('_', ' ')}, each time that it runs."
    scenario(tags=TAGS)(body)


for _change in CHANGES:
    _register_change(_change)


class Recomputing(torch.autograd.Function):
    """Runs a module again in its backward, as reversible blocks do, and a backward through it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, block: nn.Module, backward: Callable[[Tensor, Tensor], object]
    ) -> Tensor:
        ctx.block, ctx.run = block, backward
        ctx.save_for_backward(x)
        with torch.no_grad():
            result: Tensor = block(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            ctx.run(ctx.block(x), grad)
        return x.grad, None, None


#: how a backward is run inside a backward.
WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "by_the_method": lambda out, grad: out.backward(grad),
    "by_the_function": lambda out, grad: torch.autograd.backward([out], [grad]),
    "twice": lambda out, grad: [out.backward(grad / 2, retain_graph=True) for _ in range(2)],
}


def _register_recomputing(name: str) -> None:
    def body(p: Probe) -> None:
        first, block = p.module(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
        call = p.compile(lambda x: Recomputing.apply(first(x), block, WAYS[name]).sin())
        for step in range(3):
            with p.backward():
                call(p.randn(3, 4)).sum().backward()
            p.value(f"grads{step}", tuple(one.grad for one in (*first.parameters(), *block.parameters())))

    body.__name__ = f"backward_changes_gradients_of_a_module_on_its_context_{name}"
    body.__doc__ = f"A Function runs a module again, and a backward through it {name.replace('_', ' ')}."
    scenario(tags=TAGS)(body)


for _way in WAYS:
    _register_recomputing(_way)


def _normalised(p: Probe) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return p.module(nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 2)))


def _counting(p: Probe) -> nn.Module:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.layer(x).tanh() * self.calls
            return out

    return p.module(Counting())


def _normalising_power(p: Probe) -> nn.Module:
    return p.module(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()))


def _dropping(p: Probe) -> nn.Module:
    return p.module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 4)))


#: modules that do not do the same when they run again.
MODULES: dict[str, Callable[[Probe], nn.Module]] = {
    "batch_norm": _normalised,
    "counter": _counting,
    "power_iteration": _normalising_power,
    "dropout": _dropping,
}


def _register_checkpoint(name: str, reentrant: bool, keeps_random: bool) -> None:
    def body(p: Probe) -> None:
        model, x = MODULES[name](p), p.leaf("x", p.randn(5, 4, requires_grad=True))

        def run(x: Tensor) -> Tensor:
            inner = checkpoint(
                lambda a: model(a.sin()), x, use_reentrant=reentrant, preserve_rng_state=keeps_random
            )
            loss: Tensor = inner.cos().sum() * torch.rand(())
            return loss

        call = p.compile(run)
        for step in range(2):
            out = call(x)
            with p.backward():
                out.backward()
            p.value(f"next{step}", torch.rand(2))

    kind = ("reentrant" if reentrant else "plain") + ("" if keeps_random else "_without_random_state")
    body.__name__ = f"checkpoint_{kind}_of_a_{name}"
    body.__doc__ = (
        f"A checkpoint ({kind.replace('_', ' ')}) runs a {name.replace('_', ' ')} twice in each step."
    )
    scenario(tags=("compiled", "aot", "checkpoint"), fp64=False)(body)


for _module in MODULES:
    for _reentrant in (True, False):
        for _keeps_random in (True, False):
            _register_checkpoint(_module, _reentrant, _keeps_random)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        x = functional.dropout(x, 0.5)
    return x * torch.rand(4)


def _forked_and_seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        x = functional.dropout(x, 0.5)
    return x * torch.rand(4)


def _put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = x * torch.rand(4)
    torch.set_rng_state(state)
    return x * torch.rand(4)


def _put_back_at_the_end(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = x * torch.rand(4)
    torch.set_rng_state(state)
    return x


#: functions that set the state of a generator.
STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "forked": _forked,
    "forked_and_seeded": _forked_and_seeded,
    "put_back": _put_back,
    "put_back_at_the_end": _put_back_at_the_end,
}


def _register_state(name: str) -> None:
    def body(p: Probe) -> None:
        x, call = (
            p.leaf("x", p.randn(4, requires_grad=True)),
            p.compile(lambda a: STATES[name](a.sin()).sum()),
        )
        for step in range(2):
            out = call(x)
            p.value(f"next{step}", torch.rand(2))
            with p.backward():
                out.backward()

    body.__name__ = f"generator_is_{name}"
    body.__doc__ = (
        f"The state of the random number generator is {name.replace('_', ' ')} inside the function."
    )
    scenario(tags=("compiled", "aot", "random"), fp64=False)(body)


for _state in STATES:
    _register_state(_state)
