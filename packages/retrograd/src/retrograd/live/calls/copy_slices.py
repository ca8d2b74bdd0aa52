"""Gradient of an in-place operation on a view: the parts around the operation's own backward.

In: the gradient of the base tensor. Out: the gradient that the operation's backward receives, and after
it the gradients of the base before the operation. The rule is ``CopySlices::apply_impl`` in
``torch/csrc/autograd/functions/tensor.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from retrograd._torch.state import without_torch_functions

Geometry = tuple[Sequence[int], Sequence[int], int]


@without_torch_functions
def prologue(
    grad: torch.Tensor | None, base: Geometry, view: Geometry
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Copy the base's gradient and cut out the part under the view.

    Args:
        grad: gradient of the base after the operation, of the base's sizes; None if undefined.
        base, view: sizes, strides and storage offset (in elements).

    Returns:
        The copy, its part under the view (an alias of the copy), and a contiguous clone of that part.
    """
    if grad is None:
        return None, None, None
    result = grad.new_empty_strided(tuple(base[0]), tuple(base[1]))
    result.copy_(grad)
    part = result.as_strided(tuple(view[0]), tuple(view[1]), view[2] - base[2])
    return result, part, part.clone(memory_format=torch.contiguous_format)


@without_torch_functions
def epilogue(
    needs: Sequence[bool],
    result: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    part: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Put the operation's gradient in place of the part under the view.

    Args:
        needs: which of the operation's inputs want a gradient.
        result, part: from `prologue`; `result` is changed in place through `part`.
        grads: what the operation's backward returned.
    """
    if result is None:
        return [None] * len(needs)
    outputs: list[torch.Tensor | None] = [None] * len(needs)
    for i, needed in enumerate(needs):
        grad = grads[i]
        if not needed or grad is None:
            continue
        if i == 0:
            assert part is not None
            part.copy_(grad)
            outputs[i] = result
        else:
            outputs[i] = grad
    return outputs
