"""What only torch's internals know of a tensor: who refers to it, and which layout its gradient owes.

The layout contract is ``torch/csrc/autograd/utils/grad_layout_contract.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def layout_contract_enforced() -> bool:
    """Whether gradients must have their parameter's layout (may be switched off from 2.13 on)."""
    asked = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)
    return True if asked is None else bool(asked())


def is_non_overlapping_and_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a block of memory, each once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def obeys_layout_contract(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a dense `grad` has the strides that ``variable.grad`` owes."""
    if grad.is_nested or variable.layout is not torch.strided:
        return False
    if not is_non_overlapping_and_dense(variable):
        return grad.is_contiguous()
    return all(
        stride == owed if size != 1 else stride != 0
        for size, stride, owed in zip(grad.shape, grad.stride(), variable.stride(), strict=False)
    )


def clone_for_layout_contract(grad: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    """A copy of `grad` with the strides that ``variable.grad`` owes; differentiable in grad mode."""
    if variable.layout is torch.strided and is_non_overlapping_and_dense(variable):
        empty = grad.new_empty_strided(
            variable.shape, variable.stride(), dtype=grad.dtype, device=variable.device
        )
        return empty.copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


#: torch's own: a subclass may have a property called ``grad``, which eager's C++ does not call.
_grad: Any = torch._C.TensorBase.grad
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor], None] = _grad.__set__


def accumulate_in_node(variable: torch.Tensor, grad: torch.Tensor) -> None:
    """Have the AccumulateGrad node of `variable` write its ``.grad``, without any hook."""
    leaf: Any = variable
    with torch.enable_grad():
        node = leaf.clone().grad_fn.next_functions[0][0]  # no view: some layouts have none
    hooks = leaf._post_accumulate_grad_hooks or {}
    kept = dict(hooks)
    hooks.clear()  # the node calls what is in there; the plan calls it in its own time
    try:
        node(grad)
    finally:
        hooks.update(kept)


def zeros_for_slot(node: Any, slot: int) -> torch.Tensor:
    """Zeros in place of an undefined gradient for the differentiable output number `slot` of an
    ``autograd.Function``."""
    return zeros_of_slot(node, slot)()


def zeros_of_slot(node: Any, slot: int) -> Callable[[], torch.Tensor]:
    """Makes such zeros later, without holding on to `node`."""
    metadata = node._input_metadata[slot]
    return functools.partial(torch.zeros, metadata.shape, dtype=metadata.dtype, device=metadata.device)


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to retain the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
