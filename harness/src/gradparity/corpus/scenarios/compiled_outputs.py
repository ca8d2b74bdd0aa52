"""A compiled forward and its outputs: unused, returned from the middle, aliased, differentiated one by one.

In: a probe, whose `compile` is the identity for eager. Out: gradients as eager has them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


class TwoHeads(nn.Module):
    """Two linear heads on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x).tanh(), self.unused(x).tanh()


@scenario(tags=("compiled", "unused"), issue="pytorch#131794")
def output_outside_the_loss(p: Probe) -> None:
    """Parameters of an output that the loss does not use keep `.grad` None."""
    heads = p.module(TwoHeads())
    used, _ = p.compile(heads)(p.randn(4, 3))
    with p.backward():
        used.sum().backward()


@scenario(tags=("compiled", "unused"), issue="pytorch#131794")
def output_outside_the_loss_and_adamw(p: Probe) -> None:
    """A parameter without gradient is left alone by AdamW, weight decay and all."""
    heads = p.module(TwoHeads())
    run = p.compile(heads)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1, weight_decay=0.5, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        loss = run(p.randn(4, 3))[0].pow(2).mean()
        with p.backward():
            loss.backward()
        optimizer.step()
    p.value("unused", heads.unused.weight.detach())
    p.value("used", heads.used.weight.detach())


@scenario(tags=("compiled", "unused"), issue="pytorch#131794")
def expert_left_out_and_momentum(p: Probe) -> None:
    """An expert that is not chosen in the second step keeps its weights, whatever its momentum."""
    heads = p.module(TwoHeads())
    run = p.compile(heads)
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for chosen in ((0, 1), (0,), (0,)):
        optimizer.zero_grad()
        outputs = run(p.randn(4, 3))
        with p.backward():
            torch.stack([outputs[i].sum() for i in chosen]).sum().backward()
        optimizer.step()
    p.value("left_out", heads.unused.weight.detach())


@scenario(tags=("compiled", "unused", "errors"), issue="pytorch#131794")
def unused_input_of_a_compiled_function(p: Probe) -> None:
    """`autograd.grad` refuses an input that only feeds an output outside the loss."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    first, _ = p.compile(lambda a, b: (a.sin(), b.cos()))(x, y)
    with p.backward():
        p.value("allowed", torch.autograd.grad(first.sum(), [x, y], allow_unused=True, retain_graph=True))
        torch.autograd.grad(first.sum(), [x, y])


@scenario(tags=("compiled", "unused", "hooks"), issue="pytorch#131794")
def hook_on_an_unused_output(p: Probe) -> None:
    """The hook of an output that the loss does not use is not called."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    used, unused = p.compile(lambda a: (a.sin(), a.cos()))(x)
    used.register_hook(p.hook("used"))
    unused.register_hook(p.hook("unused"))
    with p.backward():
        used.sum().backward()


@scenario(tags=("compiled", "unused", "multi-grad"), issue="pytorch#131794")
def multi_grad_hook_on_parameters_outside_the_loss(p: Probe) -> None:
    """A group of two parameters of which the loss uses one: the hook gets one gradient and one None."""
    heads = p.module(TwoHeads())
    group = (heads.used.bias, heads.unused.bias)
    register_multi_grad_hook(group, p.hook("group", kind="multi_grad"), mode="all")
    used, _ = p.compile(heads)(p.randn(4, 3))
    with p.backward():
        used.sum().backward()


@scenario(tags=("compiled", "retain-grad"), issue="pytorch#91468")
def retain_grad_on_a_compiled_output(p: Probe) -> None:
    """`retain_grad` on an output that another output was computed from gives its whole gradient."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        hidden = a.sin()
        return hidden, hidden.exp()

    hidden, out = p.compile(run)(x)
    hidden.retain_grad()
    with p.backward():
        out.sum().backward()
    p.value("hidden.grad", hidden.grad)


@scenario(tags=("compiled", "inputs"), issue="pytorch#132929")
def gradient_of_a_returned_intermediate(p: Probe) -> None:
    """An intermediate that is returned beside the result can be differentiated by."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        hidden = a.sin()
        return hidden, hidden.exp()

    hidden, out = p.compile(run)(x)
    with p.backward():
        p.value("grad", torch.autograd.grad(out.sum(), hidden, allow_unused=True))


class Features(nn.Module):
    """A small classifier that returns its features as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(2, 3)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(image).relu()
        return features, self.head(features.mean((2, 3)))


@scenario(tags=("compiled", "inputs"), issue="pytorch#132929")
def grad_cam(p: Probe) -> None:
    """Grad-CAM: the gradient of a class score with respect to the feature maps that were returned."""
    model = p.module(Features())
    features, scores = p.compile(model)(p.randn(1, 1, 5, 5))
    with p.backward():
        (weights,) = torch.autograd.grad(scores[0, 1], features)
    p.value("cam", (weights.mean((2, 3), keepdim=True) * features).sum(1).relu().detach())


@scenario(tags=("compiled", "hooks"), issue="pytorch#91468")
def hook_on_a_returned_intermediate(p: Probe) -> None:
    """A hook on an intermediate that is returned runs, and its result flows on."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        hidden = a.sin()
        return hidden, hidden.exp()

    hidden, out = p.compile(run)(x)
    hidden.register_hook(p.hook("hidden", lambda g: None if g is None else g * 2))
    with p.backward():
        out.sum().backward()


@scenario(tags=("compiled", "retain-graph"), issue="pytorch#118739")
def two_outputs_two_backwards(p: Probe) -> None:
    """Two outputs with separate graphs can be differentiated in two separate backwards."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    first, second = p.compile(lambda a, b: (a.sin(), b.exp()))(x, y)
    with p.backward():
        first.sum().backward()
        p.value("between", (x.grad, y.grad))
        second.sum().backward()


@scenario(tags=("compiled", "retain-graph"), issue="pytorch#118739")
def unbound_outputs_one_by_one(p: Probe) -> None:
    """The rows of an unbind, which saves nothing, can be differentiated one by one without `retain_graph`."""
    x = p.leaf("x", p.randn(3, 2, requires_grad=True))
    rows = p.compile(lambda a: a.unbind(0))(x)
    with p.backward():
        for i, row in enumerate(rows):
            row.sum().backward()
            p.value(f"after{i}", x.grad)


@scenario(tags=("compiled", "views"), issue="pytorch#195357")
def detached_and_viewed_outputs(p: Probe) -> None:
    """A result, a view of it and a detached alias are returned: gradients flow through the first two."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = a.sin()
        return result.detach(), result.view(-1), result

    constant, flat, result = p.compile(run)(x)
    p.event("requires_grad", constant.requires_grad, flat.requires_grad, result.requires_grad)
    with p.backward():
        (flat.exp().sum() + (result * constant).sum()).backward()


@scenario(tags=("compiled", "views"), issue="pytorch#195357")
def detached_output_beside_a_view(p: Probe) -> None:
    """A detached alias and a view of one result are returned: the view carries the gradient."""
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))

    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        result = a.sin()
        return result.detach(), result.view(-1)

    constant, flat = p.compile(run)(x)
    p.event("requires_grad", constant.requires_grad, flat.requires_grad)
    with p.backward():
        (flat * 2).sum().backward()


@scenario(tags=("compiled", "views", "in-place"), issue="pytorch#198095")
def aliased_inputs_and_a_view_output(p: Probe) -> None:
    """Two overlapping views come in, one is changed in place, a view of the other goes out."""
    x = p.leaf("x", p.randn(4, requires_grad=True))

    def run(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b[1:]

    base = x * 1
    out = p.compile(run)(base[:3], base[1:])
    with p.backward():
        (out * p.randn(2)).sum().backward()


@scenario(tags=("compiled", "views", "in-place"), issue="pytorch#186561")
def detached_outputs_are_no_views(p: Probe) -> None:
    """What `detach` gives is no view, so it can be detached in place, and changed with a gradient."""
    x, weight = p.leaf("x", p.randn(2, 3, requires_grad=True)), p.leaf("w", p.randn(2, 3, requires_grad=True))

    def loss_and_log(a: Tensor) -> tuple[Tensor, ...]:
        loss = (a * a).sum()
        return loss, loss.detach(), a.detach(), a.t().detach(), a.detach()[0]

    loss, *detached = p.compile(loss_and_log)(x)
    for i, one in enumerate(detached):
        p.value(f"{i} is a view", torch.tensor(one._is_view()))
    for one in detached[:3]:
        one.detach_()
    changed = detached[1].clone().mul_(weight)
    with p.backward():
        (loss + changed.sum()).backward()


@scenario(tags=("compiled", "views", "in-place"), issue="pytorch#186561")
def detached_input_without_a_gradient_is_no_view(p: Probe) -> None:
    """A detach of an input is no view, whether or not the input needs a gradient, and under `no_grad`."""
    x, y = p.randn(3), p.leaf("y", p.randn(3, requires_grad=True))

    def detached(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            inside, view = b.detach(), b.view(3)
        return a.detach(), b.detach(), inside, view

    results = p.compile(detached)(x, y)
    for i, one in enumerate(results):
        p.value(f"{i} is a view", torch.tensor(one._is_view()))
    with torch.no_grad():
        results[0].detach_().add_(1)
    p.value("written through", x)
    with p.backward():
        y.sum().backward()


@scenario(tags=("compiled", "in-place"), issue="pytorch#90507")
def truncated_backward_through_time(p: Probe) -> None:
    """A hidden state that the step returns beside a view of it is detached in place before the next step."""
    cell = p.module(nn.RNNCell(2, 3))

    def step(one: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = cell(one, hidden)
        return hidden, hidden.detach()

    run, hidden = p.compile(step), p.randn(4, 3)
    for _ in range(3):
        output, hidden = run(p.randn(4, 2), hidden)
        hidden.detach_()
        with p.backward():
            output.square().mean().backward()
