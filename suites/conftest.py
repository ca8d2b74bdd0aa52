"""What every test gets: one thread a process, fixed seeds, no trace that nobody reads, a report header.

In: pytest's own collection. Out: the same, with `gpu` tests left out on machines without one.
"""

from __future__ import annotations

import logging
import os
import pathlib

# Before torch is imported: thread pools are sized once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

SEED = 0
TRACE_LOG = logging.getLogger("torch.__trace")


def pytest_report_header() -> list[str]:
    """Say which torch and which device the tests run on."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return [
        f"torch {torch.__version__}, device {device}, {torch.get_num_threads()} thread a process, seed {SEED}"
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `gpu` where there is no GPU, and, unless `-m` asks, those marked `slow`
    (`nox -s long` runs these) or `programs` (`nox -s programs`, or their file is named). They count as
    deselected."""
    named = {pathlib.Path(argument.partition("::")[0]).resolve() for argument in config.args}
    left_out = [
        item for item in items if _is_left_out(item, bool(config.option.markexpr), item.path in named)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item, are_marks_named: bool, is_file_named: bool) -> bool:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return True
    starts_programs = item.get_closest_marker("programs") and not is_file_named
    return bool(item.get_closest_marker("slow") or starts_programs) and not are_marks_named


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _trace_nothing()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _trace_nothing()


def _trace_nothing() -> None:
    """Take pytest off torch's log for tlparse, which is always at its lowest level. A listener there makes
    torch write down each graph, guard and size with its stack, which no user's run does."""
    TRACE_LOG.handlers = [
        one for one in TRACE_LOG.handlers if not type(one).__module__.startswith("_pytest.")
    ]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
