"""Data parallelism on two real processes: FSDP2 and DDP are compiled between their hooks, and right.

Stock compiled autograd computes wrong gradients for the first, silently (it drops ``queue_callback``).
"""

from __future__ import annotations

import pytest

from distributed import parallel
from distributed.group import spawned
from distributed.ranks import compare

pytestmark = pytest.mark.programs

RANKS = 2


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_two_ranks_get_eagers_gradients(wrapper: str, backend: str) -> None:
    spawned(compare, RANKS, wrapper, backend)


def test_tensor_parallelism_is_compiled_and_equals_eager() -> None:
    spawned(parallel.compare, RANKS)
