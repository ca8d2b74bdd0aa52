"""Data parallelism on two real processes: FSDP2 is compiled, DDP's C++ reducer falls back; both are right.

Stock compiled autograd computes wrong gradients for the first, silently (it drops ``queue_callback``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing

from distributed import parallel
from distributed.ranks import compare, rendezvous_file

RANKS = 2


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_two_ranks_get_eagers_gradients(wrapper: str, backend: str, tmp_path: Path) -> None:
    arguments = (RANKS, rendezvous_file(tmp_path), wrapper, backend)
    torch.multiprocessing.spawn(compare, args=arguments, nprocs=RANKS)


def test_tensor_parallelism_is_compiled_and_equals_eager(tmp_path: Path) -> None:
    arguments = (RANKS, rendezvous_file(tmp_path))
    torch.multiprocessing.spawn(parallel.compare, args=arguments, nprocs=RANKS)
