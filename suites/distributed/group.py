"""Starts ranks on this machine, and lets each join the others.

In: a function that one rank runs, and how many ranks there are. Out: nothing, or what a rank raised.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def spawned(run: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run ``run(rank, ranks, rendezvous, *arguments)`` on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = (run, ranks, os.path.join(folder, "rendezvous"), *arguments)
        torch.multiprocessing.spawn(_run_and_leave, args=given, nprocs=ranks)


def _run_and_leave(rank: int, run: Callable[..., None], *arguments: Any) -> None:
    """Run a rank, and leave at once. Once in some thirty runs on a busy machine, a thread in C++ aborted a
    rank, perhaps because the interpreter was shutting down under it. We have not seen the cause."""
    run(rank, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def joined(rank: int, ranks: int, rendezvous: str, limit: timedelta | None = None) -> Iterator[torch.device]:
    """Inside, this rank is one of a group, with one thread: by NCCL if each has a GPU, else by gloo.

    Args:
        limit: how long a collective may take; None: torch's own limit.

    Yields:
        The rank's device.
    """
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend, meeting = "nccl" if on_gpu else "gloo", f"file://{rendezvous}"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=limit)
    try:
        yield device
    finally:
        dist.destroy_process_group()
