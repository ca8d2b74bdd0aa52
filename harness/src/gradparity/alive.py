"""alive: whether the device of a process still answers.

In: a device. Out: yes or no. A kernel whose assertion fails, or that reads where it may not, ends the CUDA
context of its process: from then on every call raises what that kernel did, whichever program makes it.
"""

from __future__ import annotations

import torch


def is_alive(device: torch.device) -> bool:
    """Whether what was started on the device comes to an end without an error."""
    if device.type == "cpu":
        return True
    try:
        torch.get_device_module(device).synchronize()
    except RuntimeError:
        return False
    return True
