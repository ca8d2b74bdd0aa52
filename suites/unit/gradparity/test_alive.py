"""A process whose device no longer answers runs no further case."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradparity import work
from gradparity.alive import is_alive
from gradparity.executors.unit import Unit
from gradparity.fuzzing import work as fuzzing
from gradparity.fuzzing.work import FuzzTask
from gradparity.work import Task


def fails() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(("synchronize", "alive"), [(fails, False), (lambda: None, True)])
def test_a_gpu_is_asked_to_finish(monkeypatch, synchronize: Callable[[], None], alive: bool) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_alive(torch.device("cuda")) is alive
    assert is_alive(torch.device("cpu"))


@pytest.mark.parametrize("alive", [True, False])
def test_a_unit_ends_early_where_the_device_is_gone(monkeypatch, alive: bool) -> None:
    fuzzed = FuzzTask("eager", "cpu", 0, ("elementwise",), 0, 2, 30.0, 0.0)
    asked = Task("eager", "op_db", "add", "cpu", 0, limit=2)
    for module, run, task in ((work, work.run_unit, asked), (fuzzing, fuzzing.fuzz_unit, fuzzed)):
        steps: list[int] = []

        def emit(kind: str, step: int, data: dict[str, Any], steps: list[int] = steps) -> None:
            steps += [step] if kind == "result" else []

        monkeypatch.setattr(module, "is_alive", lambda device: alive)
        assert run(Unit(task.to_json(), 30.0), emit) is alive
        assert steps == ([0, 1] if alive else [0])
