"""torch's warning that a gradient was accumulated into a ``.grad`` that lacks its parameter's layout.

In: the ``.grad`` before an addition, the gradient, and the parameter. Out: the warning, given by torch
itself, in its own words and as often as it wants (once per process): an AccumulateGrad node is run on tensors
without data that have the same sizes and strides. The rule is ``CHECK_RESULT`` in ``accumulate_grad.h``.
"""

from __future__ import annotations

import torch

from retrograd._torch.autograd.capture_turns import window
from retrograd._torch.autograd.engine import EngineRequest, run_stock
from retrograd._torch.releases import is_layout_enforced
from retrograd._torch.tensor import grad_of, obeys_layout_contract

#: whether torch was made to warn already, by grad mode: it has one warning for each branch of its code.
_warned: set[bool] = set()


def warn_of_layout(existing: torch.Tensor, grad: torch.Tensor, variable: torch.Tensor) -> None:
    """Have torch warn, if eager would have when it added `grad` to the ``.grad`` that was `existing`."""
    total = grad_of(variable)
    create_graph = torch.is_grad_enabled()
    if total is None or (create_graph in _warned and not torch.is_warn_always_enabled()):
        return
    if not _is_dense(total, existing, grad, variable) or not is_layout_enforced():
        return
    if obeys_layout_contract(total, variable):
        return
    _warned.add(create_graph)
    with torch.inference_mode(False), torch.enable_grad():
        like = torch.empty_strided(variable.shape, variable.stride(), device="meta").requires_grad_()
        like.grad = _like(existing)
        root = like.view_as(like)
    with window.stock():
        run_stock(EngineRequest((root,), (_like(grad),), create_graph, create_graph, accumulate_grad=True))


def _is_dense(*tensors: torch.Tensor) -> bool:
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
