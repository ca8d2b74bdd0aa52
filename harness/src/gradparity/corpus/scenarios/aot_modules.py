"""Modules compiled ahead: state that changes between calls, buffers, hooks, parts that are replaced.

In: a probe, whose `compile` is the identity for eager. Out: outputs, gradients and state after every call.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "modules")


def _state(p: Probe, name: str, module: nn.Module) -> None:
    """Observe all buffers."""
    p.value(name, tuple(buffer.detach().clone() for buffer in module.buffers()))


def _kept(model: nn.Module, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Number and size of each call, with gradients cleared before."""
    for step, size in enumerate(sizes):
        model.zero_grad()
        yield step, size


@scenario(tags=TAGS)
def aot_batch_norm_in_training_and_evaluation(p: Probe) -> None:
    """Running statistics and the counter of batches move in training calls, and only there."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))
    run = p.compile(model)
    for step, size in _kept(model, (4, 4, 5, 4)):
        model.train(step != 2)
        with p.backward():
            run(p.randn(size, 3)).square().sum().backward()
        _state(p, f"buffers{step}", model)
        p.value(f"grad{step}", model[0].weight.grad)


class Counter(nn.Module):
    """Counts its calls in a buffer and keeps a running mean of its input."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        return (x - self.mean) * self.scale / self.calls


@scenario(tags=TAGS)
def aot_buffers_assigned_and_changed(p: Probe) -> None:
    """A buffer that is assigned anew and one that is changed in place hold eager's values after each call."""
    model = p.module(Counter())
    run = p.compile(model)
    for step, size in _kept(model, (2, 2, 3)):
        with p.backward():
            run(p.randn(size, 3)).square().sum().backward()
        _state(p, f"buffers{step}", model)


@scenario(tags=TAGS)
def aot_parameter_replaced_between_calls(p: Probe) -> None:
    """A parameter that is replaced by another one after the first call: the new one is used and trained."""
    model = p.module(nn.Linear(3, 2))
    run, x = p.compile(model), p.randn(4, 3)
    with p.backward():
        run(x).sum().backward()
    model.weight = nn.Parameter(p.randn(2, 3))
    p.leaf("new", model.weight)
    with p.backward():
        run(x).square().sum().backward()


@scenario(tags=TAGS)
def aot_bias_added_between_calls(p: Probe) -> None:
    """A bias that was None is used and trained once there is one."""
    model = p.module(nn.Linear(3, 2, bias=False))
    run, x = p.compile(model), p.randn(4, 3)
    p.value("before", run(x).detach())
    model.bias = nn.Parameter(p.randn(2))
    p.leaf("new", model.bias)
    with p.backward():
        run(x).square().sum().backward()


@scenario(tags=TAGS)
def aot_submodule_replaced_between_calls(p: Probe) -> None:
    """So is a layer that is replaced by one of another kind."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    run, x = p.compile(model), p.randn(4, 3)
    p.value("before", run(x).detach())
    model[1] = nn.Sequential(nn.Linear(3, 3), nn.Softplus())
    p.module(model[1], "new")
    with p.backward():
        run(x).square().sum().backward()


@scenario(tags=(*TAGS, "islands"))
def aot_parts_frozen_and_thawed(p: Probe) -> None:
    """Which layers require grad changes between calls: frozen ones get None."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    run = p.compile(model)
    for step, _ in _kept(model, (1, 1, 1, 1)):
        model[0].requires_grad_(step in (0, 2))
        model[2].requires_grad_(step in (0, 1))
        out = run(p.randn(2, 3))
        p.event(f"out{step}", out.requires_grad)
        if out.requires_grad:
            with p.backward():
                out.sum().backward()
        p.value(f"grads{step}", tuple(param.grad for param in model.parameters()))


@scenario(tags=TAGS)
def aot_forward_hook_that_changes_the_output(p: Probe) -> None:
    """A forward hook of an inner layer that scales its output, set after the first call, then removed."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    run, x = p.compile(model), p.randn(2, 3)
    p.value("before", run(x).detach())
    handle = model[0].register_forward_hook(lambda module, args, out: out * 2)
    with p.backward():
        out = run(x)
        out.sum().backward()
    p.value("with", out.detach())
    handle.remove()
    p.value("after", run(x).detach())


@scenario(tags=(*TAGS, "hooks"), issue="pytorch#117265")
def aot_forward_hook_that_records(p: Probe) -> None:
    """A forward hook that records is called in every call, not only in the first."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    model[1].register_forward_hook(p.hook("tanh", kind="module_forward"))
    run = p.compile(model)
    for step in range(3):
        p.event(f"call{step}")
        with p.backward():
            run(p.randn(2, 3)).sum().backward()


@scenario(tags=(*TAGS, "hooks"))
def aot_forward_pre_hook_that_changes_the_input(p: Probe) -> None:
    """A forward pre hook on the compiled module itself is part of it."""
    model = p.module(nn.Linear(3, 2))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        p.compile(model)(x).sum().backward()


@scenario(tags=(*TAGS, "hooks"))
def aot_full_backward_hook_on_the_compiled_module(p: Probe) -> None:
    """A full backward hook on the compiled module, set after the first call, sees both its gradients."""
    model = p.module(nn.Linear(3, 2))
    run, x = p.compile(model), p.leaf("x", p.randn(2, 3, requires_grad=True))
    for step in range(2):
        with p.backward():
            run(x).square().sum().backward()
        if step == 0:
            model.register_full_backward_hook(p.hook("model", kind="module_full"))


class Double(nn.Module):
    """A parametrisation that doubles."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@scenario(tags=TAGS)
def aot_parametrization_added_and_removed(p: Probe) -> None:
    """A parametrised weight trains the tensor underneath; without the parametrisation it trains itself."""
    model = p.module(nn.Linear(3, 2))
    run, x = p.compile(model), p.randn(4, 3)
    p.value("before", run(x).detach())
    parametrize.register_parametrization(model, "weight", Double())
    with p.backward():
        run(x).square().sum().backward()
    p.value("original", model.parametrizations.weight.original.grad)
    parametrize.remove_parametrizations(model, "weight")
    p.value("after", run(x).detach())


@scenario(tags=TAGS)
def aot_weight_norm_and_spectral_norm(p: Probe) -> None:
    """Norms as parametrisations; the spectral one moves its buffers in training."""
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Tanh(), spectral_norm(nn.Linear(3, 2)))
    p.module(model)
    run = p.compile(model)
    for step, size in _kept(model, (2, 2)):
        with p.backward():
            run(p.randn(size, 3)).square().sum().backward()
        _state(p, f"buffers{step}", model)
        p.value(f"grads{step}", tuple(param.grad for param in model.parameters()))


class Lists(nn.Module):
    """Parameters in a list and in a dictionary, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(3)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.zeros(3))})

    def forward(self, x: Tensor, count: int, key: str) -> Tensor:
        for scale in self.scales[:count]:
            x = (x * scale).sin()
        return x + self.shifts[key]


@scenario(tags=TAGS)
def aot_parameter_lists_used_in_part(p: Probe) -> None:
    """How many parameters a call uses depends on its arguments; the others have no gradient."""
    model = p.module(Lists())
    run = p.compile(model)
    for step, (count, key) in enumerate(((3, "a"), (1, "b"), (2, "a"), (1, "b"))):
        model.zero_grad()
        with p.backward():
            run(p.randn(2, 3), count, key).sum().backward()
        p.value(f"grads{step}", tuple(param.grad for param in model.parameters()))


@scenario(tags=TAGS)
def aot_lazy_module_after_its_first_call(p: Probe) -> None:
    """A lazy module that was given its sizes by a call in eager mode is an ordinary module."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    model(torch.zeros(1, 3))
    p.module(model)
    with p.backward():
        p.compile(model)(p.randn(2, 3)).square().sum().backward()


@scenario(tags=TAGS)
def aot_lazy_module_before_its_first_call(p: Probe) -> None:
    """A lazy module that is compiled before its first call gets its parameters in that call."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Tanh()).to(p.device)
    run = p.compile(model)
    x = torch.ones(2, 3, device=p.device)
    for _ in range(2):
        with p.backward():
            run(x).square().sum().backward()
    p.event("shape", tuple(model[0].weight.shape), model[0].weight.grad is not None)


@scenario(tags=TAGS)
def aot_attribute_that_the_forward_sets(p: Probe) -> None:
    """A number and a tensor that the forward keeps on the module are those of the last call."""

    class Remembers(nn.Module):
        """Keeps its last result and counts its calls."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x * self.weight
            return self.last.sin() * self.calls

    model = p.module(Remembers())
    run = p.compile(model)
    for step in range(3):
        with p.backward():
            run(p.randn(2, 3)).sum().backward(retain_graph=True)
            model.last.sum().backward()
        p.event(f"calls{step}", model.calls)
        p.value(f"last{step}", model.last.detach())


@scenario(tags=TAGS)
def aot_state_loaded_between_calls(p: Probe) -> None:
    """`load_state_dict`, with and without `assign`, changes what the next call computes."""
    model = p.module(nn.Linear(3, 2))
    run, x = p.compile(model), p.randn(2, 3)
    for step in range(3):
        if step:
            state = {"weight": p.randn(2, 3), "bias": p.randn(2)}
            model.load_state_dict(state, assign=step == 2)
        with p.backward():
            run(x).square().sum().backward()
        p.value(f"grad{step}", model.weight.grad)


@scenario(tags=TAGS)
def aot_method_and_attributes_of_the_compiled_module(p: Probe) -> None:
    """The compiled module is used as the module: parameters, `train`, `zero_grad`, `state_dict`."""
    model = p.module(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    run = p.compile(model)
    with p.backward():
        run(p.randn(4, 3)).square().sum().backward()
    p.event("parameters", sum(1 for _ in run.parameters()), run.training, len(run.state_dict()) == 7)
    run.zero_grad()
    p.event("cleared", model[0].weight.grad is None)
    run.eval()
    p.event("training", model[1].training)


@scenario(tags=TAGS)
def aot_module_called_with_keywords(p: Probe) -> None:
    """A module with keyword arguments, of which one is None in every other call."""

    class Masked(nn.Module):
        """A linear layer under an optional mask."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
            out = self.linear(x)
            return {"out": out if mask is None else out * mask}

    model = p.module(Masked())
    run = p.compile(model)
    for step in range(4):
        mask = p.rand(2, 3) if step % 2 else None
        with p.backward():
            run(p.randn(2, 3), mask=mask)["out"].square().sum().backward()
        p.value(f"grad{step}", model.linear.weight.grad)


class Counted:
    """Neither module nor tensor."""

    def __init__(self) -> None:
        self.calls, self._seen = 0, 0


@scenario(tags=TAGS)
def aot_attributes_that_are_set_on_arguments(p: Probe) -> None:
    """Objects and modules among the arguments count calls, also where a call cannot be captured."""

    def count(x: Tensor, *given: Any) -> Tensor:
        for one in given[:2]:
            one.calls = getattr(one, "calls", 0) + 1
        given[0]._seen += 2
        return x * given[0].calls

    def fill(x: Tensor, *given: Any) -> Tensor:
        count(x, *given)
        given[2].append(x.shape[0])
        return x * given[1].calls

    for name, function in (("counts", count), ("fills", fill)):
        x = p.leaf(name, p.randn(3, requires_grad=True))
        run, given = p.compile(function), (Counted(), nn.Identity(), list[int]())
        for step in range(3):
            with p.backward():
                run(x, *given).sum().backward()
            p.event(f"{name}{step}", given[0].calls, given[0]._seen, given[1].calls, len(given[2]))


class Remembering(nn.Module):
    """Keeps what it has seen in containers, reads them, and draws random numbers outside of torch."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.ways, self.history, self.table, self.kinds = ways, list[Any](), {"rate": 1.0}, set[Any]()

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what the containers say."""
        scale = len(self.history) + self.table["rate"] + len(self.kinds)
        if "list" in self.ways:
            self.history.append(x.shape[0])
        if "dictionary" in self.ways:
            self.table["rate"] *= 2
        if "set" in self.ways:
            self.kinds.add(len(self.kinds))
        if "random" in self.ways:
            scale += random.random()
        if "numpy" in self.ways:
            scale += float(np.random.rand())
        return x * self.weight * scale


@scenario(tags=TAGS)
def aot_containers_and_random_numbers_of_a_module(p: Probe) -> None:
    """A module fills containers, or others do between calls; Python's random numbers go on as drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        for way in ("none", "list", "dictionary", "set", "random", "numpy", "list and set"):
            random.seed(p.seed)
            np.random.seed(p.seed)
            model = Remembering(tuple(way.split()))
            model = p.module(model, way)
            run = p.compile(model)
            for step in range(4):
                x = p.randn(2, 3)
                with p.backward():
                    run(x).sum().backward()
                drawn = random.random(), float(np.random.rand())
                p.event(f"{way} {step}", len(model.history), model.table["rate"], len(model.kinds), *drawn)
                if step == 1:
                    model.history.append(0)
                    model.table["rate"] += 1
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
