"""Faults about what autograd saves, and about what custom Functions ask of their context.

In: a function or module. Out: a function that calls it with autograd's promises broken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

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


def _without(name: str) -> AbstractContextManager[Any]:
    """A method of the context of Functions does nothing."""
    return mock.patch.object(FunctionCtx, name, return_value=None)


def _applied(applied: Callable[[Any, Any, tuple[Any, ...]], Any]) -> AbstractContextManager[Any]:
    """Functions are applied by this, which gets torch's own way, the class and the arguments."""
    before = torch.autograd.Function.__dict__[APPLY]

    def apply(cls: Any, *args: Any) -> Any:
        return applied(before.__get__(None, cls), cls, args)

    return mock.patch.object(torch.autograd.Function, APPLY, classmethod(apply))


def _without_identities(apply: Any, cls: Any, args: tuple[Any, ...]) -> Any:
    """A Function that returns its input, or a view of all of it, is taken for nothing."""
    result = apply(*args)
    for arg in args:
        if isinstance(arg, torch.Tensor) and isinstance(result, torch.Tensor) and _is_same(arg, result):
            return arg
    return result


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    same_memory = one.numel() > 0 and one.data_ptr() == two.data_ptr()
    return same_memory and one.shape == two.shape and one.stride() == two.stride()


def _first_gradient_only(apply: Any, cls: Any, args: tuple[Any, ...]) -> Any:
    """Of two equal arguments of a Function only the first is differentiated."""
    seen: set[int] = set()
    given = []
    for arg in args:
        twice = isinstance(arg, torch.Tensor) and id(arg) in seen
        given.append(arg.detach() if twice else arg)
        seen.add(id(arg))
    return apply(*given)


def _inlined_in_transforms(apply: Any, cls: Any, args: tuple[Any, ...]) -> Any:
    """Under a transform of torch.func, a Function is its forward, and its backward is ignored."""
    inside_one = torch._C._functorch.peek_interpreter_stack() is not None
    own = cls.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context
    return cls.forward(*args) if inside_one and own else apply(*args)


def _with_backward(change: Callable[[Any], Any]) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
    """Functions are applied with their backward changed."""

    def applied(apply: Any, cls: Any, args: tuple[Any, ...]) -> Any:
        made = type(cls.__name__, (cls,), {"backward": staticmethod(change(cls.backward))})
        return apply.__func__(made, *args)

    return applied


def _forgetful(backward: Any) -> Any:
    """What a backward writes on its context is gone at the next call."""

    def run(ctx: Any, *grads: Any) -> Any:
        before = dict(ctx.__dict__)
        try:
            return backward(ctx, *grads)
        finally:
            ctx.__dict__.clear()
            ctx.__dict__.update(before)

    return run


def _rehearsed(backward: Any) -> Any:
    """A backward runs once more before it counts, on copies of its gradients."""

    def run(ctx: Any, *grads: Any) -> Any:
        backward(ctx, *(grad.clone() if isinstance(grad, torch.Tensor) else grad for grad in grads))
        return backward(ctx, *grads)

    return run


def _padded(backward: Any) -> Any:
    """A backward that returns too few gradients is taken to mean None for the others."""

    def run(ctx: Any, *grads: Any) -> Any:
        result = backward(ctx, *grads)
        given = result if isinstance(result, tuple) else (result,)
        return (*given, *[None] * (len(ctx.needs_input_grad) - len(given)))

    return run


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
          compiled_by(inside(lambda: _applied(_without_identities))), (*GRAD, "grad-none", "value-requires_grad", "log", "no-exception", "hook-payload-bits"), FUNCTIONS),
    Fault("equal-arguments", "one tensor in two slots of a Function gets one of its gradients",
          compiled_by(inside(lambda: _applied(_first_gradient_only))), (*GRAD, "value-values-bits", "values-bits"), FUNCTIONS),
    Fault("materialize-ignored", "set_materialize_grads(False) is not heard",
          compiled_by(inside(lambda: _without("set_materialize_grads"))), (*GRAD, "grad-none", "event-none"), FUNCTIONS),
    Fault("non-differentiable-ignored", "mark_non_differentiable is not heard",
          compiled_by(inside(lambda: _without("mark_non_differentiable"))), ("value-requires_grad",), FUNCTIONS),
    Fault("dirty-ignored", "mark_dirty is not heard",
          compiled_by(inside(lambda: _without("mark_dirty"))), ("state-version", "raises RuntimeError", "no-exception", "value-requires_grad", *GRAD), FUNCTIONS),
    Fault("transform-ignores-function", "torch.func.grad differentiates a Function's forward",
          compiled_by(inside(lambda: _applied(_inlined_in_transforms))), ("values-bits", "value-values-bits", *GRAD), ("transforms",)),
    Fault("context-forgotten", "what a backward writes on its context is gone at the next call",
          compiled_by(inside(lambda: _applied(_with_backward(_forgetful)))), (*GRAD, "values-bits", "value-values-bits"), FUNCTIONS),
    Fault("backward-rehearsed", "the backward of a Function runs once more than in eager",
          compiled_by(inside(lambda: _applied(_with_backward(_rehearsed)))), ("log", "hook-count", "values-bits", *GRAD), FUNCTIONS,
          scenario="effects_happen_once_in_a_functions_backward_printed"),
    Fault("too-few-gradients", "a backward that returns too few gradients is accepted",
          compiled_by(inside(lambda: _applied(_with_backward(_padded)))), ("no-exception",), FUNCTIONS),
)  # fmt: skip
