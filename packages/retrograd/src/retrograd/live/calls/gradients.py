"""Adding gradients: where several meet, and into ``.grad``. The one place that writes ``.grad``.

In: gradients (None is undefined). Out: their sum, or the parameter's ``.grad``. The rules are those of
``InputBuffer::add`` (``input_buffer.cpp``) and ``AccumulateGrad::accumulateGrad``
(``accumulate_grad.h``) in ``torch/csrc/autograd``.
"""

from __future__ import annotations

from sys import getrefcount

import torch

from retrograd._torch.autograd import warn_of_layout
from retrograd._torch.releases import is_layout_enforced
from retrograd._torch.state import without_torch_functions
from retrograd._torch.tensor import (
    accumulate_in_node,
    clone_for_layout_contract,
    grad_of,
    obeys_layout_contract,
    set_grad,
)

#: references to a gradient that may be stolen: a local variable, and `getrefcount`'s argument. The rule is
#: ``is_tensor_stealable`` in ``torch/csrc/autograd/variable.h``.
OWN_REFERENCES = 2


Grad = torch.Tensor | None


@without_torch_functions
def sum_gradients(*grads: Grad) -> Grad:
    """The sum in the order given; undefined gradients count for nothing. Sparse ones are added to dense
    ones, never the other way round."""
    total: Grad = None
    for grad in grads:
        if total is None or grad is None:
            total = grad if total is None else total
        elif total.is_sparse and not grad.is_sparse:
            total = grad + total
        else:
            total = total + grad
    return total


def accumulate_quietly(variable: torch.Tensor, box: list[Grad], kept_for_post_hooks: bool = False) -> None:
    """Write a gradient into ``variable.grad`` with eager's rules: steal, copy, or add.

    Args:
        variable: a leaf.
        box: the gradient, taken out of the list so that nobody but this function refers to it (a
            gradient that somebody else refers to is copied, not stolen).
        kept_for_post_hooks: whether the plan refers to the gradient too, to show it to the node's post hooks:
            eager does the same, and steals it nevertheless.
    """
    grad = box.pop()
    if grad is None or not variable.requires_grad:
        return
    asked = variable.grad_dtype
    if asked is not variable.dtype and asked is not None and grad.dtype is not asked:
        grad = grad.to(asked)
    existing = grad_of(variable)
    if existing is None:
        # Asked here, not in a function of its own: a call to Python holds one more reference where Dynamo's
        # evaluation of frames is installed.
        others = getrefcount(grad) - OWN_REFERENCES - int(kept_for_post_hooks)
        stealable = not torch.is_grad_enabled() and others <= 0 and grad._use_count() <= 1  # type: ignore[attr-defined]
        _write(variable, _first(variable, grad, stealable), grad)
        return
    if existing.is_sparse and not grad.is_sparse:
        _write(variable, grad + existing, grad)
    elif torch.is_grad_enabled():
        _write(variable, existing + grad, grad)
    else:
        existing += grad
    warn_of_layout(existing, grad, variable)


accumulate_grad = without_torch_functions(accumulate_quietly)
accumulate_grad.__name__ = accumulate_grad.__qualname__ = "accumulate_grad"


def _write(variable: torch.Tensor, total: torch.Tensor, grad: torch.Tensor) -> None:
    """Make `total` the ``.grad``. Python refuses one of another size, dtype or layout than the leaf, which
    eager's C++ does not: then torch's own node accumulates `grad`."""
    try:
        set_grad(variable, total)
    except RuntimeError:
        accumulate_in_node(variable, grad)


def _first(variable: torch.Tensor, grad: torch.Tensor, stealable: bool) -> torch.Tensor:
    if stealable and _may_be_taken_over(variable, grad):
        return grad.detach()
    if stealable and grad.is_sparse and _parts_are_contiguous(grad):
        return torch.sparse_coo_tensor(grad._indices(), grad._values(), grad.shape, check_invariants=False)
    if grad.layout is not torch.strided or grad.is_nested:
        return grad.clone()
    return clone_for_layout_contract(grad, variable)


def _may_be_taken_over(variable: torch.Tensor, grad: torch.Tensor) -> bool:
    if grad.is_mkldnn:
        return True
    if grad.layout is not torch.strided or variable.layout is torch.sparse_csr:
        return False
    return not is_layout_enforced() or obeys_layout_contract(grad, variable)


def _parts_are_contiguous(grad: torch.Tensor) -> bool:
    return grad._indices().is_contiguous() and grad._values().is_contiguous()
