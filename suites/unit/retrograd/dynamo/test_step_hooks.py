"""Hooks in a step: they run as in eager, in its order, with what it gives them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unit.retrograd.dynamo.twins import Program, assert_compiled, run_twins


def batches(count=4, size=5):
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for _ in range(count)]


def program(model, opt, prepare=lambda loss, logits: None, before=lambda i: None, events=None):
    def step(x, y):
        opt.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        prepare(loss, logits)
        loss.backward()
        opt.step()
        return loss

    return Program(step, batches(), [model], [opt], before=before, events=[] if events is None else events)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_hooks_on_parameters():
    def build():
        model = mlp()
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

        def triple(p):
            p.grad.mul_(3)

        model[2].bias.register_post_accumulate_grad_hook(triple)
        return program(model, torch.optim.SGD(model.parameters(), 0.1))

    assert_compiled(run_twins(build))


def test_hooks_on_inner_values_and_retained_gradients():
    def build():
        model = mlp()

        def prepare(loss, logits):
            logits.register_hook(lambda grad: grad * 0.5)
            logits.retain_grad()

        return program(model, torch.optim.Adam(model.parameters(), 0.1), prepare)

    assert_compiled(run_twins(build))


def test_hooks_on_modules():
    def build():
        model = mlp()
        model[0].register_forward_hook(lambda module, args, output: output * 1.5)
        model[2].register_full_backward_hook(lambda module, grads, outer: tuple(g * 2 for g in grads))
        model[2].register_full_backward_pre_hook(lambda module, outer: tuple(g * 3 for g in outer))
        return program(model, torch.optim.SGD(model.parameters(), 0.1))

    assert_compiled(run_twins(build))


def test_hooks_on_nodes():
    def build():
        model = mlp()

        def prepare(loss, logits):
            loss.grad_fn.register_prehook(lambda grads: tuple(g * 2 for g in grads))
            logits.grad_fn.register_hook(
                lambda grads, outer: tuple(None if g is None else g * 2 for g in grads)
            )

        return program(model, torch.optim.SGD(model.parameters(), 0.1), prepare)

    assert_compiled(run_twins(build))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_in_the_backward(make):
    def build():
        model = mlp()
        optimizers = {p: make([p], lr=0.01) for p in model.parameters()}

        def hook(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return Program(step, batches(), [model], list(optimizers.values()))

    assert_compiled(run_twins(build))


def test_hooks_that_note_what_they_see_run_in_order():
    def build():
        model, events = mlp(), []
        for name, p in model.named_parameters():
            p.register_hook(lambda grad, name=name: events.append((name, grad.sum().item())))
            p.register_post_accumulate_grad_hook(lambda p, name=name: events.append((name, "post")))
        return program(model, torch.optim.SGD(model.parameters(), 0.1), events=events)

    assert_compiled(run_twins(build))


def test_a_hook_that_comes_and_goes():
    def build():
        model = mlp()
        handles = []

        def before(i):
            if i == 2:
                handles.append(model[0].weight.register_hook(lambda grad: grad * 2))
            if i == 3:
                handles.pop().remove()

        return program(model, torch.optim.SGD(model.parameters(), 0.1), before=before)

    assert_compiled(run_twins(build))


def test_a_hook_on_the_node_that_accumulates():
    def build():
        model = mlp()
        node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
        node.register_prehook(lambda grads: tuple(g * 2 for g in grads))
        made = program(model, torch.optim.SGD(model.parameters(), 0.1))
        made.events.append("kept")
        model.node = node  # or it would be gone
        return made

    run_twins(build)


def test_a_hook_that_the_step_registers_on_a_parameter():
    def build():
        model = mlp()

        def prepare(loss, logits):
            model[0].weight.register_hook(lambda grad: grad * 1.1)

        return program(model, torch.optim.SGD(model.parameters(), 0.1), prepare)

    run_twins(build)


def test_a_hook_on_one_argument_is_not_that_of_another():
    def build():
        model = mlp()
        calls = [(x.requires_grad_(), y) for x, y in batches()]

        def hook(grad):
            return grad * 7

        for x, _ in calls[1::2]:
            x.register_hook(hook)
        made = program(model, torch.optim.SGD(model.parameters(), 0.1))
        made.calls, made.tensors = calls, [x for x, _ in calls]
        return made

    assert_compiled(run_twins(build))
