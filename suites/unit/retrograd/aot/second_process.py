"""A step of a function in what is a new process as far as Dynamo knows. What stands on disk is left.

In: a function of a tensor of 4 x 6, and options of the backend. Out: what the step gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Program = Callable[[torch.Tensor], Any]


def in_a_new_process(fn: Program, **options: Any) -> list[torch.Tensor]:
    """What a step of `fn` gives where Dynamo knows nothing of it: outputs and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(fn, backend="retrograd", options={"strict": True, **options})
    outputs = compiled(x)
    flat = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    roots = [output for output in flat if output.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    assert x.grad is not None
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    found = [*flat, x.grad, *(p.grad for p in parameters if p.grad is not None)]
    for parameter in parameters:
        parameter.grad = None
    return [value.detach().clone() for value in found]
