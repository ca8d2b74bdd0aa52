"""Calls user code as eager does: hooks, backwards of ``autograd.Function``, unpack hooks.

In: a hook and gradients; a Function's context, gradients, and the saved tensors that the engine lifted; or an
unpack hook and what the pack hook returned. Out: the gradients after the hook; one gradient for each input of
the forward; or the saved tensor. The rules for what hooks and Functions may return, and the error texts, are
those of ``PyNode::apply`` in ``torch/csrc/autograd/python_function.cpp``, of ``python_hook.cpp``, and of
``check_variable_result`` in ``variable.cpp``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import BackwardCFunction

from retrograd.engine import (
    call_cpp_tensor_pre_hooks,
    counts_other_hooks,
    materializes_grads,
    node_under_way,
    raise_modified,
    saved_name,
    states_of,
)
from retrograd.runtime.modes import without_torch_functions
from retrograd.runtime.tensor import graph_is_kept, zeros_of_slot

Grad = torch.Tensor | None
#: tensors, with the states that they must have
Pairs = Sequence[tuple[torch.Tensor, int]]


def unpack(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """Call the unpack hook of a built-in node. Such a node unpacks its saved tensors when it starts.

    If a hook has left grad mode on, and the running node still has the saved tensor, we read the tensor from
    the node, because the node knows the tensor's history.
    """
    if torch.is_grad_enabled() and (name := saved_name(node_under_way(), hook, packed)) is not None:
        # Reading it attaches the edge into the graph, or marks it as a leaf. The engine does not hand that
        # over.
        saved: torch.Tensor = getattr(node_under_way(), name)
        return saved
    tensor = hook(packed)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            "Output of saved tensor unpack_hook expected to be a Tensor "
            f"but got result of type {type(tensor)}"
        )
    return tensor


class FunctionContext:
    """Replaces ``ctx`` during one backward.

    Attributes are read from and written to the Function's own context, so that the next backward finds the
    state that this one leaves. Only the saved tensors come from the plan, because the engine has already
    released those of the context. It compares equal to the context, which is also the autograd node.
    """

    __slots__ = ("__weakref__", "_ctx", "_saved", "_states")

    def __init__(self, ctx: Any, saved: Sequence[Any], states: Pairs) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_saved", saved)
        object.__setattr__(self, "_states", states)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The saved tensors. Raises what eager raises if one was changed in place since the backward
        began."""
        if self._saved is None:  # torch raises its own error
            return self._ctx.saved_tensors
        raise_modified(self._states)
        return tuple(self._saved)

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """Deprecated name of `saved_tensors`."""
        text = "'saved_variables' is deprecated; use 'saved_tensors'"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.saved_tensors

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._ctx)

    def maybe_clear_saved_tensors(self) -> None:
        """Drop the saved tensors, if torch would. They are also removed from the list that the plan still
        holds while it waits for the backward."""
        if not graph_is_kept():
            if isinstance(self._saved, list) and any(isinstance(v, torch.Tensor) for v in self._saved):
                list.clear(self._saved)  # made for this run; perhaps a list of FX, whose own ``clear`` raises
            object.__setattr__(self, "_saved", None)
            object.__setattr__(self, "_states", ())

    def __eq__(self, other: object) -> bool:
        return self._ctx is (other._ctx if type(other) is type(self) else other)

    def __hash__(self) -> int:
        return hash(self._ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)


_context_classes: WeakKeyDictionary[type, type[FunctionContext]] = WeakKeyDictionary()


def _context_class(cls: type) -> type[FunctionContext]:
    """`FunctionContext` with the name of the context class that it replaces."""
    if cls not in _context_classes:
        names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _context_classes[cls] = type(cls.__name__, (FunctionContext,), names)
    return _context_classes[cls]


def call_backward(
    ctx: Any,
    grads: Sequence[Grad],
    saved: Sequence[Any],
    is_tensor: Sequence[bool],
    zeros: Sequence[Any],
    modified: Pairs = (),
) -> list[Grad]:
    """Run the Function's ``backward`` (or ``vjp``).

    Args:
        ctx: the Function's context, which is also its autograd node.
        grads: gradients of the forward's outputs. Undefined ones become zeros unless
            ``ctx.set_materialize_grads(False)`` was called.
        saved: saved tensors.
        is_tensor: for each argument of the forward, whether it was a tensor.
        zeros: for each gradient that nothing produces, what the engine passes instead: sizes, dtype, device
            and layout of zeros, or () for none. None for a gradient that something may produce.
        modified: saved tensors, with their states when the backward began; given if one has changed since.

    Returns:
        One gradient for each argument of the forward.

    Raises:
        RuntimeError: wrong number of gradients, a gradient for an argument that was not a tensor, or one that
            is neither a tensor nor None.
        Exception: whatever the user's backward raises, unchanged.
    """
    # Only the context may hold the pairs: the backward lets them go. Eager accepts what was detached in place
    # since a Function has saved it.
    accepted = [(value, state | 1) for value, state in (*modified, *_with_states(saved))]
    given = _context_class(type(ctx))(ctx, saved, accepted)
    del accepted
    return _call(ctx, given, grads, is_tensor, zeros)


def _with_states(saved: Sequence[Any]) -> Pairs:
    states = zip(saved, states_of(saved), strict=True)
    return [(value, state) for value, state in states if state is not None]


def call_kept_backward(
    ctx: Any, grads: Sequence[Grad], is_tensor: Sequence[bool], zeros: Sequence[Any]
) -> list[Grad]:
    """Like `call_backward`, for a context that the engine has not released. The backward unpacks its saved
    tensors whenever it reads them, and torch checks their versions. Afterwards we release them, as eager
    does.
    """
    result = _call(ctx, ctx, grads, is_tensor, zeros)
    ctx.maybe_clear_saved_tensors()
    return result


def _call(
    ctx: Any, given: Any, grads: Sequence[Grad], is_tensor: Sequence[bool], zeros: Sequence[Any]
) -> list[Grad]:
    grads = [_zeros(ctx, i, zeros[i]) if grad is None else grad for i, grad in enumerate(grads)]
    result = BackwardCFunction.apply(given, *grads)
    found = result if type(result) is tuple else (result,)
    expected = len(is_tensor)
    if len(found) > expected and all(grad is None for grad in found[expected:]):
        found = found[:expected]
    if len(found) != expected:
        raise RuntimeError(
            f"function {ctx.name()} returned an incorrect number of gradients "
            f"(expected {expected}, got {len(found)})"
        )
    for i, (grad, tensor) in enumerate(zip(found, is_tensor, strict=True)):
        if grad is not None and not tensor:
            raise RuntimeError(
                f"function {ctx.name()} returned a gradient different than None at position {i + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__})")
    return list(found)


def _zeros(ctx: Any, slot: int, made: Any) -> Grad:
    """What the Function receives in place of an undefined gradient."""
    if made is None:
        return zeros_of_slot(ctx, slot)() if materializes_grads(ctx) else None
    if not made:
        return None
    sizes, dtype, device, layout = made
    return torch.zeros(sizes, dtype=dtype, device=device, layout=layout)


Grads = tuple[Grad, ...]


def call_tensor_hook(hook: Callable[..., Any], grad: Grad) -> Grad:
    """``hook(grad) -> grad | None``."""
    result = hook(grad)
    return grad if result is None or result is grad else _checked(hook, grad, result)


def call_hook_of_unreached(hook: Callable[..., Any], grad: None) -> None:
    """Call the hook of an output of a compiled function that the root does not depend on.

    Eager never calls such a hook. But hooks of ``register_multi_grad_hook`` count one another by asking which
    *nodes* will be executed, and all outputs of a compiled function share one node.
    """
    if counts_other_hooks(hook):
        hook(grad)


def call_cpp_tensor_hook(hook: int, grad: Grad) -> Grad:
    """Call a hook that C++ registered, such as the one of ``retain_grad``. Works only in the engine's
    frame."""
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
