"""Hooks registered by C++, which only the engine's running call can reach."""

from __future__ import annotations

import torch
from torch._C._dynamo import compiled_autograd as engine_protocol

__all__ = ["call_cpp_tensor_pre_hooks"]


def call_cpp_tensor_pre_hooks(hook: int, grad: torch.Tensor) -> torch.Tensor:
    """Call C++ hook number `hook` of the backward whose engine frame is alive."""
    result = engine_protocol.call_cpp_tensor_pre_hooks(hook, grad)
    assert isinstance(result, torch.Tensor)
    return result
