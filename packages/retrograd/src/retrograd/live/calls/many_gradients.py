"""Writing many gradients into ``.grad``, where nobody can look in between.

In: leaves and their gradients, in eager's order. Out: each ``.grad`` as `accumulate_grad` leaves it. The plain
cases are decided here with few calls into torch, additions are made by one ``_foreach_add_``, and everything
else is left to `accumulate_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from sys import getrefcount

import torch

from retrograd._torch.tensors import layout_contract_enforced
from retrograd._torch.thread_state import without_torch_functions
from retrograd.live.calls.gradients import accumulate_grad

__all__ = ["accumulate_grads"]

Grad = torch.Tensor | None

_Tensor, _strided = torch.Tensor, torch.strided
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: references to a gradient that may be stolen: the loop's variable, and the argument of `getrefcount`.
_OWN_REFERENCES = 2


@without_torch_functions
def accumulate_grads(variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
    """Write ``.grad`` of each of `variables` with eager's rules.

    Args:
        variables: leaves.
        grads: one gradient each. The list is emptied, so that a gradient to which nobody else refers may be
            stolen.
    """
    grads.reverse()
    is_plain_mode = not torch.is_grad_enabled() and layout_contract_enforced()
    totals: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for variable in variables:
        grad = grads.pop()
        if (
            is_plain_mode
            and type(grad) is _Tensor
            and type(variable) in _PLAIN
            and variable.requires_grad
            and grad.layout is _strided
            and variable.layout is _strided
            and not grad.is_nested
            and not variable.is_nested
        ):
            existing = variable.grad
            if existing is None:
                # Nobody else refers to it, and it has the layout that `.grad` owes.
                if (
                    getrefcount(grad) <= _OWN_REFERENCES
                    and grad._use_count() <= 1  # type: ignore[attr-defined]
                    and _has_layout(grad, variable)
                    and grad.shape == variable.shape
                    and grad.dtype is variable.dtype
                    and grad.device == variable.device
                ):
                    variable.grad = grad.detach()
                    continue
            elif _is_addable(existing, grad, variable):
                totals.append(existing)
                addends.append(grad)
                continue
        _add(totals, addends)
        box = [grad]
        del grad
        accumulate_grad(variable, box)
    _add(totals, addends)


def _has_layout(tensor: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether both are contiguous, with the same strides; other layouts that fit are left to others."""
    strides = tensor.stride()
    return variable.is_contiguous() and strides == variable.stride() and 0 not in strides


def _is_addable(existing: torch.Tensor, grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether ``existing += grad`` is an addition of plain tensors of which torch has nothing to say."""
    return (
        type(existing) is _Tensor
        and existing.layout is _strided
        and not existing.is_nested
        and existing.dtype is grad.dtype
        and existing.device == grad.device
        and existing.shape == grad.shape
        and not existing.is_inference()
        and not (existing.is_conj() or existing.is_neg() or grad.is_conj() or grad.is_neg())
        and _has_layout(existing, variable)
    )


def _add(totals: list[torch.Tensor], addends: list[torch.Tensor]) -> None:
    """``total += addend`` for all; both lists are emptied."""
    if not totals:
        return
    if len(totals) > 1 and (totals[0].device.type == "cpu" or _are_apart([*totals, *addends])):
        torch._foreach_add_(totals, addends)
    else:
        for total, addend in zip(totals, addends, strict=True):
            total += addend
    totals.clear()
    addends.clear()


def _are_apart(tensors: list[torch.Tensor]) -> bool:
    """Whether no two share memory: a device may add them at the same time."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return all(start + size <= following for (start, size), (following, _) in pairwise(spans))
