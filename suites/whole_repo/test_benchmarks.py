"""The benchmarks: asv finds them, and their measurements measure."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import aot_measure, aot_subjects, fresh, measure, subjects
from benchmarks.models import Workload

MODULES = ("compile_time", "run_time", "memory", "aot_compile_time", "aot_run_time", "speed")
MEBIBYTE = 1 << 20


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"benchmarks.{request.param}")


def benchmarks(module: ModuleType) -> list[object]:
    """The functions that asv takes for benchmarks."""
    classes = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__
    ]
    return [
        value
        for owner in classes
        for name, value in vars(owner).items()
        if name.startswith(("track_", "time_"))
    ]


def test_asv_finds_the_benchmarks_where_its_settings_say(root: Path) -> None:
    settings = json.loads((root / "asv.conf.json").read_text())
    assert (root / settings["benchmark_dir"]).resolve() == fresh.PACKAGE
    assert (root / settings["repo_subdir"] / "pyproject.toml").is_file()


def test_every_benchmark_says_its_unit_and_what_it_is(module: ModuleType) -> None:
    found = benchmarks(module)
    assert found
    assert [
        benchmark for benchmark in found if not getattr(benchmark, "unit", "") or not benchmark.__doc__
    ] == []


def test_every_subject_of_a_benchmark_is_defined(module: ModuleType) -> None:
    assert set(getattr(module, "SUBJECTS", ())) <= {*subjects.SUBJECTS, *aot_subjects.SUBJECTS}


class Detour(torch.autograd.Function):
    """Doubles; its backward takes 32 MiB for a moment."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 + torch.ones(8 * MEBIBYTE)[0]


class DetourModel(torch.nn.Module):
    """One parameter of 4 MiB through the detour."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(MEBIBYTE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Detour.apply(self.weight)


def test_the_peak_of_a_backward_contains_what_it_took_for_a_moment() -> None:
    program = Workload(DetourModel(), torch.zeros(()))
    peak = measure.allocator_peak(program, subjects.SUBJECTS["eager"]())
    assert 32 * MEBIBYTE < peak < 64 * MEBIBYTE


def test_a_measurement_runs_in_a_fresh_process() -> None:
    seconds = fresh.measure("first_backward", subject="eager")
    assert 0 < seconds < 10


def test_starts_in_turns_fill_caches_first_and_take_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    answers = iter([30.0, 40.0, 3.0, 4.0, 6.0, 5.0, 7.0, 8.0])

    def run(measurement: str, arguments: dict[str, str], settings: dict[str, str], limit: None) -> float:
        asked.append((arguments["subject"], settings["TORCHINDUCTOR_CACHE_DIR"]))
        return next(answers)

    monkeypatch.setattr(fresh, "_run", run)
    found = fresh.starts_in_turns("first_step", ["a", "b"], rounds=3, model="small")
    assert [subject for subject, _ in asked] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len({*asked}) == 2  # each has a folder of its own
    assert found == {"a cold": 30.0, "b cold": 40.0, "a warm": 6.0, "b warm": 5.0}


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(fresh.MeasurementError, match="KeyError: 'nobody'"):
        fresh.measure("first_backward", subject="nobody")


def test_the_added_time_of_a_compiled_call_is_measured_beside_eager_and_another_subject() -> None:
    seconds = fresh.measure(
        "aot_forward_overhead", subject="retrograd-aot-eager", beside="stock-aot", rounds=3
    )
    assert list(seconds) == ["eager", "retrograd-aot-eager", "stock-aot"]
    assert 0 < seconds["eager"] < min(seconds["retrograd-aot-eager"], seconds["stock-aot"])


def test_capture_and_partition_are_measured_without_compiling() -> None:
    seconds = aot_measure.aot_capture_partition(model="small", rounds=1)
    assert list(seconds) == ["retrograd-aot-trace", "stock-aot"]
    assert min(seconds.values()) > 0


def test_the_peak_of_a_step_contains_its_forward_and_not_what_was_there_before() -> None:
    held = torch.ones(16 * MEBIBYTE)

    def step() -> None:
        torch.ones(8 * MEBIBYTE)

    assert 32 * MEBIBYTE <= aot_measure.cpu_peak_of(step) < 33 * MEBIBYTE
    assert held.numel() == 16 * MEBIBYTE


def test_every_step_of_a_pair_gives_gradients_and_leaves_none() -> None:
    steps = aot_measure.training_steps(("eager", "retrograd-aot-eager"), "small", "cpu")
    assert list(steps) == ["eager", "retrograd-aot-eager"]
    for step in steps.values():
        step()
