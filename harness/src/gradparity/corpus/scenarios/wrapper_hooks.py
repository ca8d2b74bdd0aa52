"""Hooks of the object that compiling a module returns: trackers, Grad-CAM and accelerate set theirs there.

In: a probe, whose `compile` is the identity for eager. Out: hook calls, outputs and gradients.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe


def _model(p: Probe) -> tuple[nn.Module, torch.Tensor]:
    """A model of two layers, and an input."""
    model = p.module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return model, p.leaf("x", p.randn(2, 3, requires_grad=True))


def _step(p: Probe, run: nn.Module, x: torch.Tensor, name: str) -> None:
    out = run(x)
    p.value(name, out)
    with p.backward():
        out.sin().sum().backward()


@scenario(tags=("hooks", "modules"))
def all_hooks_of_a_wrapper_run(p: Probe) -> None:
    """Forward and backward hooks, and those before them, run around the compiled module, in eager's order."""
    model, x = _model(p)
    run = p.compile(model)
    run.register_forward_pre_hook(p.hook("forward pre", kind="module"))
    run.register_forward_hook(p.hook("forward", kind="module"))
    run.register_full_backward_pre_hook(p.hook("backward pre", kind="module"))
    run.register_full_backward_hook(p.hook("backward", kind="module"))
    for number in range(2):
        _step(p, run, x, f"out {number}")


@scenario(tags=("hooks", "modules"))
def a_hook_of_a_wrapper_is_set_after_a_call_and_removed(p: Probe) -> None:
    """A full backward hook runs from the call after its registration to its removal."""
    model, x = _model(p)
    run = p.compile(model)
    _step(p, run, x, "before")
    handle = run.register_full_backward_hook(p.hook("backward", kind="module"))
    _step(p, run, x, "with")
    handle.remove()
    _step(p, run, x, "after")


@scenario(tags=("hooks", "modules"))
def a_hook_of_a_wrapper_changes_the_gradient(p: Probe) -> None:
    """What a full backward hook returns takes the place of the gradient of the input."""
    model, x = _model(p)
    run = p.compile(model)
    double = p.hook("backward", lambda module, given, got: (given[0] * 2,), kind="module")
    run.register_full_backward_hook(double)
    _step(p, run, x, "out")


@scenario(tags=("hooks", "modules"))
def a_copy_of_a_wrapper_has_its_hooks(p: Probe) -> None:
    """A deep copy of the compiled module has parameters of its own, and calls the hooks of the original."""
    model, x = _model(p)
    run = p.compile(model)
    run.register_full_backward_hook(p.hook("backward", kind="module"))
    _step(p, copy.deepcopy(run), x, "copy")
    _step(p, run, x, "original")
