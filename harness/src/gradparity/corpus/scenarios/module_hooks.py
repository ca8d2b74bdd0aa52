"""Backward hooks of modules.

In: a probe. Out: order and payload of full backward hooks and pre hooks, and the gradients that they replace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _model(p: Probe) -> nn.Sequential:
    """Return a small perceptron that is registered with the probe."""
    model: nn.Sequential = p.module(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    return model


@scenario(tags=("hooks", "module"))
def full_backward_hooks(p: Probe) -> None:
    """A module's hook runs when the gradients for its inputs are known, from the last module to the first."""
    model = _model(p)
    for name, module in model.named_modules():
        module.register_full_backward_hook(p.hook(name or "root", kind="module"))
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    with p.backward():
        model(x).sum().backward()


@scenario(tags=("hooks", "module"))
def full_backward_pre_and_post_hooks(p: Probe) -> None:
    """Pre hooks run when a module's output gradient is known; parameters are accumulated in between."""
    model = _model(p)
    for name, module in model.named_modules():
        module.register_full_backward_pre_hook(p.hook(f"{name}.pre", kind="module"))
        module.register_full_backward_hook(p.hook(f"{name}.post", kind="module"))
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    with p.backward():
        model(x).sum().backward()


@scenario(tags=("hooks", "module", "undefined"))
def full_backward_hook_on_input_without_grad(p: Probe) -> None:
    """When no input needs a gradient, the hook still runs, with None in the place of the input's gradient."""
    model = _model(p)
    model.register_full_backward_hook(p.hook("root", kind="module"))
    model[0].register_full_backward_hook(p.hook("first", kind="module"))
    with p.backward():
        model(p.randn(2, 4)).sum().backward()


@scenario(tags=("hooks", "module"))
def full_backward_hook_changes_grad_input(p: Probe) -> None:
    """What the hook returns replaces the gradient of the module's input, but not those of its parameters."""
    model = _model(p)
    model[2].register_full_backward_hook(p.hook("replace", lambda m, gi, go: (gi[0] * 10,), kind="module"))
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    with p.backward():
        model(x).pow(2).sum().backward()


@scenario(tags=("hooks", "module"))
def full_backward_pre_hook_changes_grad_output(p: Probe) -> None:
    """What the pre hook returns replaces the gradient of the module's output, for its parameters as well."""
    model = _model(p)
    model[2].register_full_backward_pre_hook(p.hook("replace", lambda m, go: (go[0] * 10,), kind="module"))
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    with p.backward():
        model(x).pow(2).sum().backward()


@scenario(tags=("hooks", "module", "errors"))
def full_backward_hook_returns_too_many(p: Probe) -> None:
    """A hook that returns more gradients than the module has inputs is a RuntimeError."""
    model = _model(p)
    model[2].register_full_backward_hook(p.hook("many", lambda m, gi, go: (gi[0], gi[0]), kind="module"))
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    with p.backward():
        model(x).sum().backward()


@scenario(tags=("hooks", "module"), issue="pytorch#117265")
def module_hooks_added_between_two_steps(p: Probe) -> None:
    """Hooks that are added after the first step run in the second one, and are gone in the third."""
    model = _model(p)
    x = p.leaf("x", p.randn(2, 4, requires_grad=True))
    handle = None
    for step in range(3):
        p.event("step", step)
        if handle is not None:
            handle.remove()
        if step == 1:
            handle = model[1].register_full_backward_hook(p.hook("tanh", kind="module"))
        with p.backward():
            model(x).sum().backward()


@scenario(tags=("hooks", "module", "shared"))
def module_hook_of_a_shared_module(p: Probe) -> None:
    """A module that is called twice has its hooks called twice in one backward."""
    layer = nn.Linear(3, 3)
    model = p.module(nn.Sequential(layer, nn.Tanh(), layer))
    layer.register_full_backward_hook(p.hook("layer", kind="module"))
    layer.weight.register_post_accumulate_grad_hook(p.hook("weight", kind="post_acc"))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        model(x).sum().backward()


class Mix(nn.Module):
    """Two inputs, two outputs."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b.sin(), a.cos() + b


@scenario(tags=("hooks", "module", "undefined"))
def module_hook_with_two_inputs_and_outputs(p: Probe) -> None:
    """One output is not used: the hook gets None for its gradient, and a tuple of two input gradients."""
    mix = Mix()
    mix.register_full_backward_pre_hook(p.hook("pre", kind="module"))
    mix.register_full_backward_hook(p.hook("post", kind="module"))
    a = p.leaf("a", p.randn(3, requires_grad=True))
    b = p.leaf("b", p.randn(3, requires_grad=True))
    first, _ = mix(a, b)
    with p.backward():
        first.sum().backward()


@scenario(tags=("hooks", "module"))
def nested_module_hooks_that_change_gradients(p: Probe) -> None:
    """An outer module's hook sees what an inner one returned, since both stand on the same tensors."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    outer = p.module(nn.Sequential(inner, nn.Linear(3, 1)))
    inner.register_full_backward_hook(p.hook("inner", lambda m, gi, go: (gi[0] * 2,), kind="module"))
    outer.register_full_backward_hook(p.hook("outer", lambda m, gi, go: (gi[0] + 1,), kind="module"))
    inner[0].register_full_backward_hook(p.hook("innermost", lambda m, gi, go: (-gi[0],), kind="module"))
    x = p.leaf("x", p.randn(2, 3, requires_grad=True))
    with p.backward():
        outer(x).sum().backward()


@scenario(tags=("hooks", "module"))
def global_module_hooks(p: Probe) -> None:
    """Hooks for all modules run before a module's own, and only while they are registered."""
    model = _model(p)
    model[2].register_full_backward_hook(p.hook("own", kind="module"))
    handles = [
        register_module_full_backward_hook(p.hook("global", kind="module")),
        register_module_full_backward_pre_hook(p.hook("global.pre", kind="module")),
    ]
    try:
        x = p.leaf("x", p.randn(2, 4, requires_grad=True))
        with p.backward():
            model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()


@scenario(tags=("hooks", "module"))
def frozen_module_with_hooks(p: Probe) -> None:
    """A frozen module between trained ones passes its gradient on and has its hooks called."""
    model = _model(p)
    model[2].requires_grad_(False)
    model[2].register_full_backward_hook(p.hook("frozen", kind="module"))
    model[1].register_full_backward_hook(p.hook("tanh", kind="module"))
    with p.backward():
        model(p.randn(2, 4)).sum().backward()


@scenario(tags=("hooks", "module"))
def forward_hook_that_hooks_its_output(p: Probe) -> None:
    """The Grad-CAM way: forward hooks keep an activation, and hooks on it catch its gradient."""
    model = _model(p)
    caught: dict[str, Tensor] = {}

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        caught["activation"] = output.detach()
        output.register_hook(p.hook("activation.grad", lambda g: caught.__setitem__("grad", g)))

    model[1].register_forward_hook(watch)
    with p.backward():
        model(p.randn(2, 4))[:, 0].sum().backward()
    p.value("cam", torch.relu((caught["activation"] * caught["grad"]).sum(1)))
