"""Writing many gradients into ``.grad``, where nobody can look in between.

In: leaves and their gradients, in eager's order. Out: each ``.grad`` as `accumulate_grad` leaves it. The
plain cases are decided here with few calls into torch, additions are made by one ``_foreach_add_``, and
everything else is left to `accumulate_grad`. An `Accumulator` remembers what was plain: then one guard in C++
says that it still is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from sys import getrefcount
from typing import Any

import torch

from retrograd._torch.releases import is_layout_enforced
from retrograd._torch.state import torch_functions_off
from retrograd._torch.trace import InputGuard, add_each
from retrograd.live.calls.gradients import OWN_REFERENCES, accumulate_grad

Grad = torch.Tensor | None

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Accumulator:
    """Accumulations that follow one another in a plan."""

    def __init__(self) -> None:
        self._pairs: InputGuard | None = None
        self._totals: InputGuard | None = None

    def __call__(self, variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
        """Write ``.grad`` of each of `variables` with eager's rules.

        Args:
            variables: leaves.
            grads: one gradient each. The list is emptied, so that a gradient to which nobody else refers may
                be stolen.
        """
        with torch_functions_off():
            is_plain = not torch.is_grad_enabled() and is_layout_enforced()
            if is_plain and self._are_as_before(variables, grads):
                self._write(variables, grads)
            else:
                _one_by_one(variables, grads)

    def _are_as_before(self, variables: Sequence[torch.Tensor], grads: Sequence[Grad]) -> bool:
        """Whether all are plain, and each gradient has the layout that its ``.grad`` owes."""
        values = [*variables, *grads]
        if not all(map(_has_plain_grads, variables)):
            return False
        if self._pairs is not None and self._pairs.check(values):
            return True
        if not all(map(_fits, grads, variables)):
            return False
        self._pairs, self._totals = InputGuard(values, (), (), None), None
        return True

    def _write(self, variables: Sequence[torch.Tensor], grads: list[Any]) -> None:
        """Of gradients that fit."""
        before: list[Any] = [variable.grad for variable in variables]
        missing = sum([total is None for total in before])
        if missing == len(before):
            grads.reverse()
            for variable in variables:
                grad = grads.pop()
                if getrefcount(grad) <= OWN_REFERENCES and grad._use_count() <= 1:
                    variable.grad = grad.detach()
                else:
                    accumulate_grad(variable, [grad])
        elif not missing and self._can_be_added_to(before, variables) and _are_apart(before, grads):
            add_each(before, grads)
            grads.clear()
        else:
            _one_by_one(variables, grads)

    def _can_be_added_to(self, totals: Sequence[Grad], variables: Sequence[torch.Tensor]) -> bool:
        """Whether all are plain, and have the layout that they owe: torch says nothing of an addition."""
        if self._totals is not None and self._totals.check(totals):
            return True
        if not all(map(_fits, totals, variables)) or any(map(_is_lazy, totals)):
            return False
        self._totals = InputGuard(totals, (), (), None)
        return True


def _one_by_one(variables: Sequence[torch.Tensor], grads: list[Grad]) -> None:
    grads.reverse()
    for variable in variables:
        accumulate_grad(variable, [grads.pop()])


def _fits(grad: Grad, variable: torch.Tensor) -> bool:
    """Whether a plain gradient has the sizes, dtype and strides of its plain leaf. Other layouts that fit too
    are left to `accumulate_grad`."""
    if type(grad) is not torch.Tensor or type(variable) not in _PLAIN or not variable.requires_grad:
        return False
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (grad, variable)):
        return False
    return (
        grad.shape == variable.shape
        and grad.dtype is variable.dtype
        and grad.device == variable.device
        and variable.is_contiguous()
        and grad.stride() == variable.stride()
        and 0 not in grad.stride()
        and not _is_lazy(grad)
    )


def _has_plain_grads(variable: torch.Tensor) -> bool:
    """Whether nobody asked for a ``.grad`` of another dtype."""
    return variable.grad_dtype is variable.dtype


def _is_lazy(tensor: Grad) -> bool:
    """Whether it is the conjugate or the negative of what is in its memory, or nobody may change it."""
    return tensor is not None and (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def _are_apart(totals: Sequence[Grad], grads: Sequence[Grad]) -> bool:
    """Whether no two share memory: devices but the CPU may add them at the same time."""
    tensors = [tensor for tensor in (*totals, *grads) if tensor is not None]
    if all(tensor.is_cpu for tensor in tensors):
        return True
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return all(start + size <= following for (start, size), (following, _) in pairwise(spans))
