"""Run one measurement in a fresh process.

In: the name of a function in `measure` and its arguments. Out: what it returned. A measurement that fails
raises with the end of its output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PACKAGE = Path(__file__).resolve().parent


#: A freed tensor leaves the process at once above this size, so that resident memory is what tensors take.
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


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


def measure(measurement: str, *, cold: bool = False, **arguments: Any) -> Any:
    """Run `measurement(**arguments)` of `measure` in a fresh single-threaded process.

    Arguments:
        measurement: the name of one of `measure.MEASUREMENTS`.
        cold: whether to run it without any compile cache.
        arguments: what to call it with.

    Returns: what it returned, through JSON.
    Raises: MeasurementError when its process fails.
    """
    with TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", f"{PACKAGE.name}.measure", measurement, json.dumps(arguments)],
            cwd=PACKAGE.parent,
            env={**os.environ, **SETTINGS, **(no_cache(cache) if cold else {})},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise MeasurementError(measurement, arguments, done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
