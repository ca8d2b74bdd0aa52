"""The process-wide settings that choose between kernels.

In: nothing. Out: their state, comparable and restorable. They decide of which kernels attention, recurrent
layers and norms consist. A trace contains the chosen kernels, and Dynamo does not guard the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: The state of each setting.
KernelChoices = tuple[Any, ...]

#: How to read and write each setting.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction),
    (lambda: tuple(torch._C._get_sdp_priority_order()), torch._C._set_sdp_priority_order),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
)


def kernel_choices() -> KernelChoices:
    """The current state of the settings."""
    return tuple([get() for get, _ in _SETTINGS])


def choose_kernels(choices: KernelChoices) -> None:
    """Put the settings into a state from `kernel_choices`."""
    for (_, set_to), choice in zip(_SETTINGS, choices, strict=True):
        set_to(choice)
