"""Faults about what autograd saves, and about what custom Functions ask of their context.

In: a function or module. Out: a function that calls it with autograd's promises broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from gradparity.subjects.planted.calls import inside
from gradparity.subjects.planted.fault import Fault, compiled_by

APPLY = "apply"


def _packed(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: saved_tensors_hooks(pack, unpack)


def _same(value: Any) -> Any:
    return value


@contextmanager
def _without(name: str) -> Iterator[None]:
    """A method of the context of Functions does nothing."""
    before = getattr(FunctionCtx, name)
    setattr(FunctionCtx, name, lambda self, *args: None)
    try:
        yield
    finally:
        setattr(FunctionCtx, name, before)


@contextmanager
def _identities_forgotten() -> Iterator[None]:
    """A Function that returns its input, or a view of all of it, is taken for nothing."""
    before = torch.autograd.Function.__dict__[APPLY]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = before.__get__(None, cls)(*args, **kwargs)
        for arg in args:
            if isinstance(arg, torch.Tensor) and isinstance(result, torch.Tensor) and _is_same(arg, result):
                return arg
        return result

    setattr(torch.autograd.Function, APPLY, classmethod(apply))
    try:
        yield
    finally:
        setattr(torch.autograd.Function, APPLY, before)


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    same_memory = one.numel() > 0 and one.data_ptr() == two.data_ptr()
    return same_memory and one.shape == two.shape and one.stride() == two.stride()


@contextmanager
def _first_gradient_only() -> Iterator[None]:
    """Of two equal arguments of a Function only the first is differentiated."""
    before = torch.autograd.Function.__dict__[APPLY]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        seen: set[int] = set()
        given = []
        for arg in args:
            twice = isinstance(arg, torch.Tensor) and id(arg) in seen
            given.append(arg.detach() if twice else arg)
            seen.add(id(arg))
        return before.__get__(None, cls)(*given, **kwargs)

    setattr(torch.autograd.Function, APPLY, classmethod(apply))
    try:
        yield
    finally:
        setattr(torch.autograd.Function, APPLY, before)


GRAD = ("grad-values-bits",)
FUNCTIONS = ("functions",)

FAULTS = (
    Fault("version-check-missed", "a saved tensor that was changed since is used without a word",
          compiled_by(inside(_packed(torch.Tensor.detach, _same))), ("no-exception", *GRAD), ("phases", "mutation")),
    Fault("saved-too-early", "what was saved is a copy, so that a change is not noticed",
          compiled_by(inside(_packed(lambda t: t.detach().clone(), _same))), ("no-exception",), ("phases", "mutation")),
    Fault("backward-mutation-lost", "a backward that changes what it saved changes a copy",
          compiled_by(inside(_packed(_same, torch.Tensor.clone))), ("state-values-bits", "state-version", "values-bits", *GRAD, "no-exception"), FUNCTIONS),
    Fault("saved-in-half", "saved tensors lose precision",
          compiled_by(inside(_packed(lambda t: (t.dtype, t.bfloat16() if t.is_floating_point() else t), lambda pair: pair[1].to(pair[0])))),
          GRAD, ("elementwise", "linear")),
    Fault("identity-function-lost", "a Function that returns its input loses its backward",
          compiled_by(inside(_identities_forgotten)), (*GRAD, "grad-none", "value-requires_grad", "log", "no-exception", "hook-payload-bits"), FUNCTIONS),
    Fault("equal-arguments", "one tensor in two slots of a Function gets one of its gradients",
          compiled_by(inside(_first_gradient_only)), (*GRAD, "value-values-bits", "values-bits"), FUNCTIONS),
    Fault("materialize-ignored", "set_materialize_grads(False) is not heard",
          compiled_by(inside(lambda: _without("set_materialize_grads"))), (*GRAD, "grad-none", "event-none"), FUNCTIONS),
    Fault("non-differentiable-ignored", "mark_non_differentiable is not heard",
          compiled_by(inside(lambda: _without("mark_non_differentiable"))), ("value-requires_grad",), FUNCTIONS),
    Fault("dirty-ignored", "mark_dirty is not heard",
          compiled_by(inside(lambda: _without("mark_dirty"))), ("state-version", "raises RuntimeError", "no-exception", "value-requires_grad", *GRAD), FUNCTIONS),
)  # fmt: skip
