"""Does a process grow while it trains?

In: a subject and a workload. Out: what is allocated after some warm steps and after many more. On a CPU,
bytes are those that the C library's allocator has handed out (glibc's `mallinfo2`), with torch's among them.
"""

from __future__ import annotations

import ctypes
import gc

import torch

from .models import workload
from .steps import training


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes(device: str) -> int:
    """Bytes that the device's allocator has handed out and not got back."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def growth(
    subject: str, model: str = "small", device: str = "cpu", warm: int = 100, steps: int = 1000
) -> dict[str, int]:
    """Bytes and Python objects after `warm` steps and after `steps` more, with no gradient around."""
    program = workload(model, device)
    trained = training(subject, program, device)
    counts: dict[str, int] = {}
    for name, number in (("before", warm), ("after", steps)):
        for _ in range(number):
            trained.step()
        program.clear()
        gc.collect()
        counts |= {f"bytes {name}": allocated_bytes(device), f"objects {name}": len(gc.get_objects())}
    return counts
