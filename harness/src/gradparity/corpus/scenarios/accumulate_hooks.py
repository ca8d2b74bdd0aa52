"""Hooks that run right after a leaf's gradient was accumulated.

In: a probe. Out: the order of these hooks, which gradients are visible inside each, and what optimizer steps
taken inside them leave behind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _three_layers(p: Probe) -> nn.Module:
    """Return three linear layers with ReLU after each, registered with the probe."""
    return p.module(nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())]))


def _visible(model: nn.Module) -> str:
    """Return the names of the parameters whose `.grad` is set, as one string."""
    return " ".join(name for name, param in model.named_parameters() if param.grad is not None)


@scenario(tags=("hooks", "accumulate", "order"), issue="pytorch#144376")
def accumulate_order_over_three_layers(p: Probe) -> None:
    """Post-accumulate hooks run from the last layer to the first, bias before weight."""
    model = _three_layers(p)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    with p.backward():
        model(p.randn(2, 4)).sum().backward()


@scenario(tags=("hooks", "accumulate", "visibility"), issue="pytorch#109774")
def gradients_become_visible_one_by_one(p: Probe) -> None:
    """When a parameter's hook runs, its own gradient is set, and those of earlier layers are not yet."""
    model = _three_layers(p)
    for name, param in model.named_parameters():
        look = p.hook(name, lambda _: p.event("visible", _visible(model)), kind="post_acc")
        param.register_post_accumulate_grad_hook(look)
    with p.backward():
        model(p.randn(2, 4)).pow(2).sum().backward()


@scenario(tags=("hooks", "accumulate", "visibility"), issue="pytorch#109774")
def optimizer_in_backward(p: Probe) -> None:
    """A step inside the hook that frees `.grad` leaves at most one gradient alive at any time."""
    model = _three_layers(p)

    def step(param: Tensor) -> None:
        p.event("alive", _visible(model))
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, step, kind="post_acc"))
    for _ in range(3):
        with p.backward():
            model(p.randn(2, 4)).pow(2).mean().backward()
    p.value("weights", tuple(param.detach() for param in model.parameters()))


@scenario(tags=("hooks", "accumulate"))
def one_optimizer_per_parameter(p: Probe) -> None:
    """One SGD with momentum per parameter, stepped in its hook, trains as one optimizer after backward."""
    model = _three_layers(p)
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}
    for q in model.parameters():
        optimizers[q] = torch.optim.SGD([q], lr=0.05, momentum=0.9)

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, step, kind="post_acc"))
    x = p.randn(4, 4)
    for _ in range(3):
        loss = model(x).pow(2).mean()
        with p.backward():
            loss.backward()
        p.value("loss", loss.detach())
    p.value("weights", tuple(param.detach() for param in model.parameters()))


@scenario(tags=("hooks", "accumulate"))
def several_accumulate_hooks(p: Probe) -> None:
    """Several hooks of one leaf run in the order of registration, and each sees what the last one did."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def double(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(2)

    x.register_post_accumulate_grad_hook(p.hook("double", double, kind="post_acc"))
    x.register_post_accumulate_grad_hook(p.hook("seen", kind="post_acc"))
    with p.backward():
        x.sin().sum().backward()
        x.cos().sum().backward()


@scenario(tags=("hooks", "accumulate"))
def accumulate_hook_removes_itself(p: Probe) -> None:
    """A hook that removes itself is not called in the second backward; the other one is."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    once = p.hook("once", lambda leaf: handle.remove(), kind="post_acc")
    handle = x.register_post_accumulate_grad_hook(once)
    x.register_post_accumulate_grad_hook(p.hook("always", kind="post_acc"))
    with p.backward():
        x.sin().sum().backward()
        x.cos().sum().backward()


@scenario(tags=("hooks", "accumulate", "errors"))
def accumulate_hook_returns_a_tensor(p: Probe) -> None:
    """A post-accumulate hook must return None; anything else is a RuntimeError, after the accumulation."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.register_post_accumulate_grad_hook(p.hook("x", lambda leaf: leaf.grad * 2, kind="post_acc"))
    with p.backward():
        x.sin().sum().backward()


@scenario(tags=("hooks", "accumulate", "errors"))
def accumulate_hook_raises(p: Probe) -> None:
    """When a hook raises, layers above keep their gradients and layers below never get one."""
    model = _three_layers(p)

    def refuse(param: Tensor) -> None:
        raise ZeroDivisionError("refused")

    for name, param in model.named_parameters():
        fn = refuse if name == "2.weight" else None
        param.register_post_accumulate_grad_hook(p.hook(name, fn, kind="post_acc"))
    with p.backward():
        model(p.randn(2, 4)).sum().backward()


@scenario(tags=("hooks", "accumulate", "errors"))
def accumulate_hook_on_an_intermediate(p: Probe) -> None:
    """Registering a post-accumulate hook on a tensor that is not a leaf is a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    x.sin().register_post_accumulate_grad_hook(p.hook("never", kind="post_acc"))


@scenario(tags=("hooks", "accumulate", "shared"))
def accumulate_hook_of_tied_weights(p: Probe) -> None:
    """A weight that two layers share is accumulated once per backward, with both contributions."""
    encoder, decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    decoder.weight = encoder.weight
    model = p.module(nn.Sequential(encoder, nn.Tanh(), decoder))
    encoder.weight.register_hook(p.hook("weight"))
    encoder.weight.register_post_accumulate_grad_hook(p.hook("weight.acc", kind="post_acc"))
    with p.backward():
        model(p.randn(2, 4)).pow(2).sum().backward()


@scenario(tags=("hooks", "accumulate"))
def accumulate_hook_without_accumulation(p: Probe) -> None:
    """`autograd.grad` accumulates nothing and calls no such hook; `inputs=` leaves out other leaves."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    y = p.leaf("y", p.randn(3, requires_grad=True))
    for name, leaf in (("x", x), ("y", y)):
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    loss = (x * y.sin()).sum()
    with p.backward():
        p.value("grads", torch.autograd.grad(loss, [x, y], retain_graph=True))
        p.event("between")
        loss.backward(inputs=[y])


@scenario(tags=("hooks", "accumulate"))
def accumulate_hook_registers_on_the_next_leaf(p: Probe) -> None:
    """A hook may register a post-accumulate hook on a leaf that is still to come; it runs."""
    near = p.leaf("near", p.randn(3, requires_grad=True))
    far = p.leaf("far", p.randn(3, requires_grad=True))

    def add_hook(leaf: Tensor) -> None:
        far.register_post_accumulate_grad_hook(p.hook("far", kind="post_acc"))

    near.register_post_accumulate_grad_hook(p.hook("near", add_hook, kind="post_acc"))
    with p.backward():
        (far.sin() * near).sum().backward()


@scenario(tags=("hooks", "accumulate"))
def accumulate_hook_replaces_the_grad(p: Probe) -> None:
    """A hook may put another tensor in the place of `.grad`; the next backward adds to that one in place."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    replacement = p.tensor([10.0, 20.0, 30.0])

    def replace(leaf: Tensor) -> None:
        leaf.grad = replacement

    handle = x.register_post_accumulate_grad_hook(p.hook("x", replace, kind="post_acc"))
    with p.backward():
        x.sin().sum().backward()
        handle.remove()
        x.cos().sum().backward()
    p.event("same_object", x.grad is replacement)


@scenario(tags=("hooks", "accumulate"))
def buckets_of_a_python_reducer(p: Probe) -> None:
    """A data-parallel reducer in Python: a bucket is averaged as soon as its last gradient is there."""
    model = _three_layers(p)
    params = list(model.parameters())
    bucket: list[Tensor] = []

    def collect(param: Tensor) -> None:
        assert param.grad is not None
        bucket.append(param.grad)
        if len(bucket) == 2:
            p.event("flush", torch.cat([grad.flatten() for grad in bucket]))
            torch._foreach_div_(bucket, 2.0)
            bucket.clear()

    for i, param in enumerate(params):
        param.register_post_accumulate_grad_hook(p.hook(f"param{i}", collect, kind="post_acc"))
    with p.backward():
        model(p.randn(3, 4)).sum().backward()
