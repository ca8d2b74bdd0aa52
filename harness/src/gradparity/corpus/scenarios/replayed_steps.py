"""Steps of one shape, often enough that what they do may be recorded and replayed, as CUDA graphs do.

In: a probe. Out: gradients, results and hook events over six and more equal steps, with what goes wrong where
a recording's memory is handed out, written again too early, or read from where nothing is any more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import show_parameters, watch_parameters
from gradparity.probe import Probe

STEPS = 7


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))


def _stepped(model: nn.Module) -> None:
    """A step of plain SGD that keeps all memory where it is."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


@scenario(tags=("replay",))
def replayed_outputs_are_kept_over_the_next_steps(p: Probe) -> None:
    """An output and a gradient that the user keeps do not change when later steps run."""
    model = p.module(_mlp())
    run = p.compile(model)
    kept: list[object] = []
    for _ in range(STEPS):
        model.zero_grad()
        out = run(p.randn(5, 4))
        with p.backward():
            out.square().sum().backward()
        kept += [out, model[0].weight.grad]
        _stepped(model)
    p.value("kept", tuple(kept))


@scenario(tags=("replay",))
def replayed_two_forwards_before_two_backwards(p: Probe) -> None:
    """The second forward leaves alone what the first one saved."""
    model = p.module(_mlp())
    run = p.compile(model)
    for step in range(STEPS):
        model.zero_grad()
        first, second = run(p.randn(5, 4)), run(p.randn(5, 4))
        for out in (first, second) if step % 2 else (second, first):
            with p.backward():
                out.square().sum().backward()
        p.value(f"grad{step}", model[0].weight.grad)
        _stepped(model)


@scenario(tags=("replay",))
def replayed_steps_with_a_second_backward(p: Probe) -> None:
    """A graph that is retained can be differentiated again, also when another forward ran in between."""
    model = p.module(_mlp())
    run = p.compile(model)
    for step in range(STEPS):
        model.zero_grad()
        out = run(p.randn(5, 4))
        with p.backward():
            out.square().sum().backward(retain_graph=True)
        if step > 3:
            run(p.randn(5, 4))
        with p.backward():
            out.sum().backward()
        p.value(f"grad{step}", model[0].weight.grad)


@scenario(tags=("replay", "accumulation"))
def replayed_accumulation_over_three_micro_steps(p: Probe) -> None:
    """Gradients of three micro-steps add up in one `.grad`, which the optimizer reads."""
    model = p.module(_mlp())
    run = p.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(3):
            with p.backward():
                run(p.randn(5, 4)).square().mean().backward()
        optimizer.step()
    show_parameters(p, model)


@scenario(tags=("replay",))
def replayed_with_inputs_from_elsewhere(p: Probe) -> None:
    """Each batch lies in memory of its own, and all of them stay alive; once the weights move too."""
    model = p.module(_mlp())
    run = p.compile(model)
    batches = [p.leaf(f"batch{i}", p.randn(5, 4, requires_grad=True)) for i in range(9)]
    for step, batch in enumerate(batches):
        if step == 6:
            model[0].weight.data = model[0].weight.data.clone()
        model.zero_grad()
        with p.backward():
            run(batch).square().sum().backward()
        _stepped(model)
    show_parameters(p, model)


@scenario(tags=("replay",))
def replayed_with_zero_grad_both_ways(p: Probe) -> None:
    """Gradients set to zero are added to in place; gradients set to None are new tensors each time."""
    model = p.module(_mlp())
    run = p.compile(model)
    for step in range(8):
        before = model[0].weight.grad
        model.zero_grad(set_to_none=step % 4 < 2)
        with p.backward():
            run(p.randn(5, 4)).square().sum().backward()
        p.value(f"same{step}", model[0].weight.grad is before)
        p.value(f"grad{step}", model[0].weight.grad)


@scenario(tags=("replay", "hooks"))
def replayed_with_a_hook_in_the_middle(p: Probe) -> None:
    """A hook between two parts sees this step's gradient, and what it returns flows on; what it saw stays."""
    first, second = p.module(_mlp(), "first"), p.module(nn.Linear(3, 2), "second")
    run_first, run_second = p.compile(first), p.compile(second)
    seen: list[Tensor] = []

    def note(grad: Tensor) -> Tensor:
        seen.append(grad)
        return grad * (1 + len(seen))

    for _ in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        hidden = run_first(p.randn(5, 4))
        hidden.register_hook(p.hook("hidden", note))
        with p.backward():
            run_second(hidden.relu()).square().sum().backward()
        _stepped(first)
        _stepped(second)
    p.value("seen", tuple(seen))


@scenario(tags=("replay",))
def replayed_in_eval_and_then_in_train(p: Probe) -> None:
    """A module with running statistics is evaluated, trained, and evaluated again."""
    model = p.module(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    run = p.compile(model)
    x = p.randn(5, 4)
    for phase in range(3):
        model.train(phase == 1)
        for step in range(5):
            model.zero_grad()
            out = run(x)
            if phase == 1:
                with p.backward():
                    out.square().sum().backward()
                _stepped(model)
            p.value(f"out{phase}{step}", out.detach().clone())
    p.value("mean", model[1].running_mean.clone())


@scenario(tags=("replay",))
def replayed_outputs_changed_in_place(p: Probe) -> None:
    """The user writes into outputs and gradients of a step; later steps do not see it."""
    model = p.module(_mlp())
    run = p.compile(model)
    x = p.randn(5, 4)
    for step in range(STEPS):
        model.zero_grad()
        out = run(x)
        with p.backward():
            out.sum().backward()
        p.value(f"step{step}", (out.detach().clone(), model[3].weight.grad.clone()))
        out.detach().fill_(100.0)
        model[3].weight.grad.fill_(100.0)


@scenario(tags=("replay",))
def replayed_with_inputs_changed_in_place(p: Probe) -> None:
    """Batches are copied into one tensor, weights are loaded in place: addresses stay, values change."""
    model = p.module(_mlp())
    run = p.compile(model)
    batch = p.randn(5, 4)
    for step in range(STEPS):
        batch.copy_(p.randn(5, 4))
        model.zero_grad()
        with p.backward():
            run(batch).square().sum().backward()
        p.value(f"grad{step}", model[0].weight.grad)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param * 0.9 + 0.01)


@scenario(tags=("replay",))
def replayed_with_one_tensor_given_twice(p: Probe) -> None:
    """Two inputs that are one tensor, then two tensors with the same values."""
    weight = p.leaf("weight", p.randn(4, 4, requires_grad=True))
    run = p.compile(lambda a, b, w: (a @ w).tanh() * b)
    for step in range(8):
        x = p.randn(3, 4)
        weight.grad = None
        with p.backward():
            run(x, x if step < 5 else x.clone(), weight).sum().backward()
        p.value(f"grad{step}", weight.grad)


@scenario(tags=("replay",))
def replayed_outputs_that_show_an_input(p: Probe) -> None:
    """An output that is a view of an input is a view of the input of this call."""
    weight = p.leaf("weight", p.randn(4, requires_grad=True))
    run = p.compile(lambda a, w: (a.view(-1), a * w))
    for step in range(STEPS):
        x = p.randn(2, 4)
        flat, product = run(x, weight)
        with p.backward():
            product.sum().backward()
        x.fill_(step)
        p.value(f"flat{step}", flat)
        p.value(f"shares{step}", flat.data_ptr() == x.data_ptr())


@scenario(tags=("replay",))
def replayed_steps_left_without_a_backward(p: Probe) -> None:
    """Forwards whose backward never comes, in between and beside those whose backward does."""
    model = p.module(_mlp())
    run = p.compile(model)
    left: list[Tensor] = []
    for step in range(8):
        model.zero_grad()
        if step % 3 == 2:
            left.append(run(p.randn(5, 4)))
        with p.backward():
            run(p.randn(5, 4)).square().sum().backward()
        p.value(f"grad{step}", model[0].weight.grad)
    with p.backward():
        torch.stack(left).sum().backward()


@scenario(tags=("replay",))
def replayed_with_an_intermediate_that_outlives_its_step(p: Probe) -> None:
    """A tensor that the graph saved, taken from its node by the user, keeps its values."""
    weight = p.leaf("weight", p.randn(4, requires_grad=True))
    run = p.compile(lambda a, w: (a * w).exp())
    kept: list[Tensor] = []
    for _ in range(STEPS):
        weight.grad = None
        out = run(p.randn(3, 4), weight)
        kept += [value for value in _saved(out) if isinstance(value, Tensor) and value.shape == out.shape]
        with p.backward():
            out.sum().backward()
    p.value("kept sums are finite", all(bool(value.isfinite().all()) for value in kept))


def _saved(value: Tensor) -> tuple[object, ...]:
    return tuple(getattr(value.grad_fn, "saved_tensors", ()))


@scenario(tags=("replay", "training", "hooks"))
def replayed_training_with_every_gradient_watched(p: Probe) -> None:
    """Adam on one shape, with a hook on every parameter."""
    model = p.module(_mlp())
    watch_parameters(p, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    run = p.compile(model)
    for _ in range(6):
        optimizer.zero_grad()
        with p.backward():
            run(p.randn(5, 4)).square().mean().backward()
        optimizer.step()
    show_parameters(p, model)


@scenario(tags=("replay",))
def replayed_shapes_in_turn(p: Probe) -> None:
    """Batches of two sizes take turns."""
    model = p.module(_mlp())
    run = p.compile(model)
    for step in range(10):
        model.zero_grad()
        with p.backward():
            run(p.randn(3 + step % 2, 4)).square().sum().backward()
        _stepped(model)
    show_parameters(p, model)
