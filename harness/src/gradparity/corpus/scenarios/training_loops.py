"""Small real training loops: several optimizers, micro-batches, loss scaling, averages, two-pass optimizers.

In: a probe. Out: the moments at which gradients arrive over two or three steps, and the weights at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.watch import show_parameters, watch_parameters
from gradparity.probe import Probe


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 6), nn.LeakyReLU(0.2), nn.Linear(6, outputs))


@scenario(tags=("steps", "training", "hooks"))
def gan_with_two_optimizers(p: Probe) -> None:
    """The judge learns from detached samples, the generator through the judge, which gets gradients too."""
    generator, judge = p.module(_mlp(2, 3), "generator"), p.module(_mlp(3, 1), "judge")
    watch_parameters(p, generator, "generator")
    watch_parameters(p, judge, "judge")
    makers = torch.optim.Adam(generator.parameters(), lr=0.01, foreach=False)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01, foreach=False)
    run_generator, run_judge = p.compile(generator), p.compile(judge)
    for _ in range(2):
        fake = run_generator(p.randn(4, 2))
        judges.zero_grad()
        loss = functional.softplus(run_judge(fake.detach())).mean()
        loss = loss + functional.softplus(-run_judge(p.randn(4, 3))).mean()
        with p.backward():
            loss.backward()
        judges.step()
        makers.zero_grad()
        with p.backward():
            functional.softplus(-run_judge(fake)).mean().backward()
        makers.step()
    show_parameters(p, generator)


@scenario(tags=("steps", "training", "accumulation", "hooks"))
def gradient_accumulation_over_micro_batches(p: Probe) -> None:
    """Four micro-batches of unequal size add up in the same `.grad`, and the optimizer steps once."""
    model = p.module(_mlp(4, 3))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    run = p.compile(model)
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        for size in (3, 3, 2, 1):
            with p.backward():
                (run(p.randn(size, 4)).pow(2).sum() / 9).backward()
        p.value("grads", tuple(param.grad for param in model.parameters()))
        optimizer.step()
    show_parameters(p, model)


@scenario(tags=("steps", "training", "autocast", "dtype", "hooks"), fp64=False)
def amp_with_a_gradient_scaler(p: Probe) -> None:
    """A bfloat16 forward, a scaled loss, gradients unscaled and clipped, one step skipped for infinity."""
    model = p.module(_mlp(4, 2))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler(p.device.type, init_scale=2.0**4, growth_interval=1)
    run = p.compile(model)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(p.device.type, dtype=torch.bfloat16):
            loss = run(p.randn(5, 4)).float().pow(2).mean()
        with p.backward():
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        p.value("scale", scaler.get_scale())
    show_parameters(p, model)


@scenario(tags=("steps", "training", "hooks"))
def exponential_average_of_weights(p: Probe) -> None:
    """A copy of the model follows it, and serves as a teacher that gets no gradients."""
    model, teacher = p.module(_mlp(3, 2)), p.module(_mlp(3, 2), "teacher").requires_grad_(False)
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    run = p.compile(model)
    for _ in range(3):
        x = p.randn(4, 3)
        with p.backward():
            functional.mse_loss(run(x), teacher(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)
    show_parameters(p, teacher)


@scenario(tags=("steps", "training", "hooks"))
def sharpness_aware_minimization(p: Probe) -> None:
    """Two backwards a step: at the weights, and at the weights moved along their gradient."""
    model = p.module(_mlp(3, 2))
    watch_parameters(p, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    run = p.compile(model)
    for _ in range(2):
        x = p.randn(4, 3)
        with p.backward():
            run(x).pow(2).mean().backward()
        with torch.no_grad():
            moves = [param.grad * 0.05 for param in model.parameters()]
            for param, move in zip(model.parameters(), moves, strict=True):
                param.add_(move)
        model.zero_grad()
        with p.backward():
            run(x).pow(2).mean().backward()
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves, strict=True):
                param.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    show_parameters(p, model)


@scenario(tags=("steps", "training", "higher-order", "hooks"))
def maml_with_two_inner_steps(p: Probe) -> None:
    """The outer gradient goes through two inner steps, each of which is a gradient that keeps its graph."""
    weight = p.leaf("weight", p.randn(3, 2, requires_grad=True))
    bias = p.leaf("bias", p.randn(2, requires_grad=True))
    for name, leaf in (("weight", weight), ("bias", bias)):
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    for task in range(2):
        fast = [weight, bias]
        for inner in range(2):
            loss = (p.randn(4, 3) @ fast[0] + fast[1]).tanh().pow(2).mean()
            with p.backward():
                grads = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [value - 0.5 * grad for value, grad in zip(fast, grads, strict=True)]
            fast[0].register_hook(p.hook(f"task{task}.inner{inner}"))
        with p.backward():
            (p.randn(4, 3) @ fast[0] + fast[1]).tanh().pow(2).mean().backward()
        p.value(f"grads{task}", (weight.grad, bias.grad))


@scenario(tags=("steps", "training", "hooks"))
def clipping_in_hooks_and_by_norm(p: Probe) -> None:
    """Each gradient is clamped by a hook as it arrives, and all are scaled by their norm afterwards."""
    model = p.module(_mlp(4, 2))
    watch_parameters(p, model)
    for name, param in model.named_parameters():
        param.register_hook(p.hook(f"clamp {name}", lambda grad: grad.clamp(-0.05, 0.05)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    run = p.compile(model)
    for _ in range(3):
        optimizer.zero_grad()
        with p.backward():
            run(p.randn(6, 4)).pow(2).sum().backward()
        p.value("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False))
        optimizer.step()
    show_parameters(p, model)


@scenario(tags=("steps", "training", "hooks"))
def contrastive_with_two_towers(p: Probe) -> None:
    """Two towers meet in a matrix of similarities with a learned temperature."""
    left, right = p.module(_mlp(3, 4), "left"), p.module(_mlp(5, 4), "right")
    temperature = p.leaf("temperature", p.tensor(0.5, requires_grad=True))
    watch_parameters(p, left, "left")
    watch_parameters(p, right, "right")
    temperature.register_hook(p.hook("temperature"))
    run_left, run_right = p.compile(left), p.compile(right)

    def similarities(one: Tensor, two: Tensor) -> Tensor:
        one, two = functional.normalize(one, dim=-1), functional.normalize(two, dim=-1)
        return one @ two.t() * temperature.exp()

    for size in (4, 3):
        logits = similarities(run_left(p.randn(size, 3)), run_right(p.randn(size, 5)))
        logits.register_hook(p.hook("logits"))
        labels = torch.arange(size, device=p.device)
        with p.backward():
            (
                functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)
            ).backward()
