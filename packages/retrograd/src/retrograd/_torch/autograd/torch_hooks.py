"""Hooks of torch's own: those registered by C++, which only the engine's running call can reach, and those
of ``register_multi_grad_hook``."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol


def call_cpp_tensor_pre_hooks(hook: int, grad: torch.Tensor) -> torch.Tensor:
    """Call C++ hook number `hook` of the backward whose engine frame is alive."""
    result = engine_protocol.call_cpp_tensor_pre_hooks(hook, grad)
    assert isinstance(result, torch.Tensor)
    return result


def counts_other_hooks(hook: Any) -> bool:
    """Whether `hook` belongs to ``torch.autograd.graph.register_multi_grad_hook``."""
    function = getattr(hook, "func", hook)
    return getattr(
        function, "__module__", None
    ) == "torch.autograd.graph" and "register_multi_grad_hook" in str(getattr(function, "__qualname__", ""))
