"""What every test gets: one thread a process, fixed seeds, a report header.

In: pytest's own collection. Out: the same, with `gpu` tests left out on machines without one.
"""

from __future__ import annotations

import os

# Before torch is imported: thread pools are sized once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

SEED = 0


def pytest_report_header() -> list[str]:
    """Say which torch and which device the tests run on."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return [
        f"torch {torch.__version__}, device {device}, {torch.get_num_threads()} thread a process, seed {SEED}"
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `gpu` out where there is no GPU; they count as deselected."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
