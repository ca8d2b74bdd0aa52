"""Settings of torch that change what a trace of a function is.

In: nothing. Out: a key, equal while they are the same; and why nothing can be captured now.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from retrograd._torch.ambient import is_foreign_mode_active, modes_now
from retrograd._torch.saved_hooks import why_saved_hooks_matter

__all__ = ["global_hooks", "settings_now", "why_not_capturable"]

_SDP = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
    )
)
_GLOBAL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def settings_now() -> Any:
    """Grad mode, autocast, default dtype and device, determinism, and which attentions are on."""
    return (
        modes_now(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_fill_uninitialized_memory()
        if hasattr(torch._C, "_get_deterministic_fill_uninitialized_memory")
        else None,
        *[is_on() for is_on in _SDP],
    )


def why_not_capturable() -> str | None:
    """What is active around the call that a graph would not notice; None if there is nothing."""
    if is_foreign_mode_active():
        return "runs under a dispatch mode or a functorch transform, which watches every operation"
    if (why := why_saved_hooks_matter()) is not None:
        return f"runs under hooks: {why}"
    if torch.is_anomaly_enabled():
        return "runs in anomaly mode, which looks at every gradient"
    if torch.is_inference_mode_enabled():
        return "runs in inference mode"
    return None


def global_hooks() -> list[Any]:
    """The containers of hooks that concern all modules, or all optimizers."""
    found = [getattr(torch_module, f"_global{name}") for name in _GLOBAL_HOOKS]
    return found + [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
