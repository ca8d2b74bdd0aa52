"""A hook timeline of a whole module: what scenarios of training loops share.

In: a probe and a module that it has registered. Out: hooks that record when each gradient is there.
"""

from __future__ import annotations

from torch import nn

from gradparity.probe import Probe


def watch_parameters(p: Probe, model: nn.Module, name: str = "m") -> None:
    """Record each parameter's gradient at the moment when it has been accumulated."""
    for key, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(p.hook(f"{name}.{key}", kind="post_acc"))


def show_parameters(p: Probe, model: nn.Module, name: str = "weights") -> None:
    """Observe the values of all parameters."""
    p.value(name, tuple(param.detach().clone() for param in model.parameters()))
