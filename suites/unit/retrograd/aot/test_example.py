"""The example of a joint graph runs as its text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "joint_graph.py"


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_joint_graph(backend: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(EXAMPLE), "--backend", backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "saved for the backward: 4224 bytes, without the pass 8448"
    assert lines[1].startswith(f"20 steps with {backend}: loss ")
    assert lines[2].startswith(f"20 more steps with {backend}: loss ")
    assert all(line.endswith(", as eager") for line in (lines[1], lines[2]))
