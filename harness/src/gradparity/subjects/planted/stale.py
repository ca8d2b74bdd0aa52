"""Faults of caches: what a compiled module saw at its first call is taken for true ever after.

In: a module. Out: a function whose later calls use something of the first one. Functions that are no modules
are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradparity.subjects.planted.fault import Fault, compiled_by

Seen = Any
Replay = Callable[[torch.nn.Module, Seen], Any]


def stale(look: Callable[[torch.nn.Module], Seen], replay: Replay) -> Callable[[Any], Any]:
    """A wrapper that looks at the module at its first call, and calls it inside `replay(module, seen)` later."""

    def wrap(target: Any) -> Any:
        if not isinstance(target, torch.nn.Module):
            return target
        seen: list[Seen] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not seen:
                seen.append(look(target))
                return target(*args, **kwargs)
            with replay(target, seen[0]):
                return target(*args, **kwargs)

        return call

    return wrap


def _numbers(module: torch.nn.Module) -> dict[str, Any]:
    plain = (int, float, str)
    return {key: each for key, each in vars(module).items() if isinstance(each, plain) and key != "training"}


@contextmanager
def _with_attributes(module: torch.nn.Module, seen: dict[str, Any]) -> Iterator[None]:
    now = {key: getattr(module, key) for key in seen if hasattr(module, key)}
    for key, value in seen.items():
        setattr(module, key, value)
    yield
    for key, value in now.items():
        setattr(module, key, value)


def _modes(module: torch.nn.Module) -> list[tuple[torch.nn.Module, bool]]:
    return [(each, each.training) for each in module.modules()]


@contextmanager
def _with_modes(module: torch.nn.Module, seen: list[tuple[torch.nn.Module, bool]]) -> Iterator[None]:
    now = _modes(module)
    for each, training in seen:
        each.training = training
    yield
    for each, training in now:
        each.training = training


def _members(kind: str) -> Callable[[torch.nn.Module], list[tuple[dict[str, Any], dict[str, Any]]]]:
    return lambda module: [(getattr(each, kind), dict(getattr(each, kind))) for each in module.modules()]


@contextmanager
def _with_members(
    module: torch.nn.Module, seen: list[tuple[dict[str, Any], dict[str, Any]]]
) -> Iterator[None]:
    now = [(place, dict(place)) for place, _ in seen]
    _put(seen)
    yield
    _put(now)


def _put(tables: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for place, content in tables:
        place.clear()
        place.update(content)


def _frozen(module: torch.nn.Module) -> list[tuple[torch.Tensor, bool]]:
    return [(each, each.requires_grad) for each in module.parameters()]


@contextmanager
def _with_frozen(module: torch.nn.Module, seen: list[tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Parameters that required grad at the first call are trained on."""
    for each, needed in seen:
        each.requires_grad_(needed)
    yield


STEPS = (
    "values-bits",
    "value-none",
    "grad-values-bits",
    "grad-none",
    "raises RuntimeError",
    "value-shape",
    "no-exception",
)
HOOKED = ("hook-count", "values-observed", *STEPS)

FAULTS = (
    Fault("stale-number", "a number in the module that changed is not noticed", compiled_by(stale(_numbers, _with_attributes)), STEPS, ("steps_state",)),
    Fault("stale-mode", "train and eval are those of the first call", compiled_by(stale(_modes, _with_modes)), STEPS, ("steps_modes", "steps_mixed")),
    Fault("stale-parameters", "parameters are those of the first call", compiled_by(stale(_members("_parameters"), _with_members)), STEPS, ("steps_parameters",)),
    Fault("stale-layers", "layers are those of the first call", compiled_by(stale(_members("_modules"), _with_members)), STEPS, ("steps_parameters",)),
    Fault("stale-buffers", "buffers are those of the first call", compiled_by(stale(_members("_buffers"), _with_members)), STEPS, ("steps_state",)),
    Fault("stale-requires-grad", "which parameters are frozen is that of the first call", compiled_by(stale(_frozen, _with_frozen)), STEPS, ("steps_requires_grad",)),
    Fault("stale-forward-hooks", "forward hooks are those of the first call", compiled_by(stale(_members("_forward_hooks"), _with_members)), HOOKED, ("steps_hooks", "steps_errors")),
    Fault("stale-backward-hooks", "backward hooks of modules are those of the first call", compiled_by(stale(_members("_backward_hooks"), _with_members)), HOOKED, ("steps_hooks",)),
)  # fmt: skip
