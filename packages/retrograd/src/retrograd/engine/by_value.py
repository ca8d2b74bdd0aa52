"""Gradient formulas that torch chooses by values; without values, torch uses one that rounds differently.

In: a node of an autograd graph inside a trace, and its gradients. Out: the results of eager's formula. We
compute all branches and select by the values. Source: ``prod_backward`` in
``torch/csrc/autograd/FunctionsManual.cpp``. Other formulas there also test whether a tensor has values
(``isTensorSubclassLike``), but call the same kernels out of place; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def results_by_value(node: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The gradients that eager's formula gives for `node`; None if torch has only one formula."""
    formula = _FORMULAS.get(node.name())
    if formula is None or grads[0] is None or not node._saved_self.dim():
        return None
    return [formula(node, grads[0])]


def _of_product(node: Any, grad: Tensor) -> Tensor:
    """For ``prod(x)``: by division if no element is zero; all zeros if several are."""
    value = node._saved_self.to(grad.dtype)
    without_zeros = grad * (node._saved_result / value).conj()
    zeros = (value == 0).sum()
    with_one = _excluding_each(grad, value.contiguous().view(-1), 0).view_as(value)
    with_zeros = torch.where(zeros > 1, torch.zeros_like(value), with_one)
    return torch.where(zeros == 0, without_zeros, with_zeros)


def _of_products(node: Any, grad: Tensor) -> Tensor:
    """For ``prod(x, dim)``: by division if no element of the whole tensor is zero."""
    value, result = node._saved_self.to(grad.dtype), node._saved_result
    dim = node._saved_dim % 2**64  # torch returns a negative one as unsigned
    dim -= 2**64 if dim >= 2**63 else 0
    if not node._saved_keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    without_zeros = grad * (result / value).conj()
    return torch.where((value == 0).any(), _excluding_each(grad, value, dim), without_zeros)


def _excluding_each(grad: Tensor, value: Tensor, dim: int) -> Tensor:
    """The gradient times the product of all other elements."""
    if value.numel() == 0:
        return torch.zeros_like(value)
    if value.shape[dim] == 1:
        return grad.expand_as(value)
    ones = torch.ones_like(value.narrow(dim, 0, 1))
    before, behind = value.narrow(dim, 0, value.shape[dim] - 1), value.narrow(dim, 1, value.shape[dim] - 1)
    products = torch.cat([ones, before], dim).cumprod(dim)
    reverse = torch.cat([ones, behind.flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (products * reverse).conj()


_FORMULAS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "ProdBackward0": _of_product,
    "ProdBackward1": _of_products,
}
