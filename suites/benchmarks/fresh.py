"""Run one measurement in a fresh process.

In: the name of a function in `measure` and its arguments. Out: what it returned. A measurement that fails
raises with the end of its output.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PACKAGE = Path(__file__).resolve().parent


SETTINGS = {"OMP_NUM_THREADS": "1"}
#: For measurements of memory: a freed tensor leaves the process at once above this size, so that resident
#: memory is what tensors take. That makes allocations slow, so what is timed has the allocator of users.
MEMORY_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class MeasurementError(RuntimeError):
    """A measurement's process failed; the message ends with what it last said."""

    def __init__(self, measurement: str, arguments: dict[str, Any], output: str) -> None:
        super().__init__(f"{measurement}({arguments}) failed:\n{output[-2000:]}")


def no_cache(folder: str) -> dict[str, str]:
    """Settings under which nothing compiled earlier is found again, by Inductor or Triton."""
    return {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TRITON_CACHE_DIR": folder,
    }


def one_cache(folder: str) -> dict[str, str]:
    """Settings under which what is compiled is found again, if it was compiled with the same folder."""
    return {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TRITON_CACHE_DIR": str(Path(folder, "triton")),
    }


def measure(measurement: str, *, cold: bool = False, limit: float | None = None, **arguments: Any) -> Any:
    """Run `measurement(**arguments)` of `measure` in a fresh single-threaded process.

    Arguments:
        measurement: the name of one of `measure.MEASUREMENTS`.
        cold: whether to run it without any compile cache.
        limit: seconds after which its process is ended.
        arguments: what to call it with.

    Returns: what it returned, through JSON.
    Raises: MeasurementError when its process fails or takes too long.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        return _run(measurement, arguments, no_cache(cache) if cold else {}, limit)


def measure_cold_and_warm(
    measurement: str, *, limit: float | None = None, runs: Sequence[str] = ("cold", "warm"), **arguments: Any
) -> dict[str, Any]:
    """As `measure`, in fresh processes, each but the first with the caches that those before have filled."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        return {name: _run(measurement, arguments, one_cache(cache), limit) for name in runs}


def starts_in_turns(
    measurement: str, subjects: Sequence[str], rounds: int = 7, **arguments: Any
) -> dict[str, float]:
    """As `measure_cold_and_warm`, of each of `subjects` with caches of its own. Once all caches are filled,
    fresh processes start in turns, so that the drift of the machine meets all subjects.

    Returns: "SUBJECT cold", and "SUBJECT warm", the median of `rounds` starts.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {subject: one_cache(str(Path(folder, subject))) for subject in subjects}

        def start(subject: str) -> float:
            seconds: float = _run(measurement, {**arguments, "subject": subject}, caches[subject], None)
            return seconds

        cold = {subject: start(subject) for subject in subjects}
        warm: dict[str, list[float]] = {subject: [] for subject in subjects}
        for number in range(rounds):
            for subject in subjects[:: 1 if number % 2 else -1]:
                warm[subject].append(start(subject))
    return {f"{subject} cold": seconds for subject, seconds in cold.items()} | {
        f"{subject} warm": statistics.median(seconds) for subject, seconds in warm.items()
    }


def python_path() -> str:
    """Where this process finds modules, this package among them (asv takes the variable itself away)."""
    return os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])


def _run(measurement: str, arguments: dict[str, Any], settings: dict[str, str], limit: float | None) -> Any:
    own = MEMORY_SETTINGS if "memory" in measurement or "growth" in measurement else {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{PACKAGE.name}.measure", measurement, json.dumps(arguments)],
            env={**os.environ, **SETTINGS, **own, **settings, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(measurement, arguments, f"not done after {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise MeasurementError(measurement, arguments, done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
