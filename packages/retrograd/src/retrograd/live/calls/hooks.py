"""Calling hooks as eager does: what they are given, what they may return, and which errors they earn.

In: the hook object and the gradients. Out: the gradients after it. The rules and error texts are those
of ``torch/csrc/autograd/python_hook.cpp`` and ``check_variable_result`` in ``variable.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd._torch.autograd import call_cpp_tensor_pre_hooks, counts_other_hooks
from retrograd._torch.state import without_torch_functions

Grad = torch.Tensor | None
Grads = tuple[Grad, ...]


def call_tensor_hook(hook: Callable[..., Any], grad: Grad) -> Grad:
    """``hook(grad) -> grad | None``."""
    result = hook(grad)
    return grad if result is None or result is grad else _checked(hook, grad, result)


def call_hook_of_unreached(hook: Callable[..., Any], grad: None) -> None:
    """The hook of an output of a compiled function that the root does not depend on.

    Eager never reaches it. But the hooks of ``register_multi_grad_hook`` count one another by asking which
    *nodes* will be executed, and all outputs of a compiled function share one node.
    """
    if counts_other_hooks(hook):
        hook(grad)


def call_cpp_tensor_hook(hook: int, grad: Grad) -> Grad:
    """A hook that C++ registered (``retain_grad`` is one). Works only in the engine's frame."""
    return grad if grad is None else call_cpp_tensor_pre_hooks(hook, grad)


def call_node_pre_hook(hook: Callable[..., Any], grads: Grads) -> Grads:
    """``hook(grad_outputs) -> grad_outputs | None``."""
    result = hook(grads)
    return grads if result is None or result is grads else _checked_tuple(hook, grads, result)


def call_node_post_hook(hook: Callable[..., Any], outputs: Grads, grads: Grads) -> Grads:
    """``hook(grad_inputs, grad_outputs) -> grad_inputs | None``."""
    result = hook(outputs, grads)
    return outputs if result is None or result is outputs else _checked_tuple(hook, outputs, result)


def call_post_accumulate_hook(hook: Callable[..., Any], variable: torch.Tensor) -> None:
    """``hook(param) -> None``."""
    result = hook(variable)
    if result is None or result is variable:
        return
    _checked(hook, variable, result)
    raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def _checked_tuple(hook: Callable[..., Any], before: Grads, after: Any) -> Grads:
    if type(after) is not tuple:
        raise TypeError(f"expected tuple, but hook returned '{_type(after)}'")
    if len(after) != len(before):
        raise RuntimeError(
            f"hook '{_name(hook)}' has returned an incorrect number of values "
            f"(got {len(after)}, but expected {len(before)})"
        )
    return tuple(_checked(hook, b, a) for b, a in zip(before, after, strict=True))


@without_torch_functions
def _checked(hook: Callable[..., Any], before: Grad, after: Any) -> Grad:
    if after is None:
        return None
    if before is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{_type(after)}'")
    if after is before:
        return after
    kinds = (before.dtype, before.device, before.layout), (after.dtype, after.device, after.layout)
    if kinds[0] != kinds[1]:
        raise RuntimeError(
            f"hook '{_name(hook)}' has changed the type of value (was {before.type()} got {after.type()})"
        )
    if before.shape != after.shape:
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")
    return after


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", "<unknown>")


def _type(value: Any) -> str:
    return type(value).__name__
