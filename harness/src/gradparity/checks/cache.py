"""Cache: a second process, which finds the caches that a first one filled, shows the same.

In: a program under a subject, found again by its case. Out: a Finding if the two processes show different
things. The caches stand in a folder that is made for the purpose.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from gradparity.corpus.base import Program
from gradparity.subjects.base import Subject
from gradparity.verdict import Finding, Verdict

LIMIT = 300.0


def cache(program: Program, subject: Subject, device: torch.device) -> Finding | None:
    """Runs the case in two processes, one after the other, with the same empty folder for caches."""
    words = [program.case.address, str(program.case.seed), subject.name, str(device)]
    with tempfile.TemporaryDirectory(prefix="gradparity-cache-") as folder:
        first, second = (_shown(words, folder) for _ in range(2))
    if first == second:
        return None
    names = [name for name in first if first[name] != second.get(name)] or ["what is shown"]
    one, two = (str(item.get(names[0]))[:120] for item in (first, second))
    reason = f"with filled caches {names[0]} is {two}, with empty ones {one}"
    return Finding(Verdict.DIVERGE, "cache", reason)


def _shown(words: list[str], folder: str) -> dict[str, Any]:
    settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gradparity.checks.once", *words]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=LIMIT, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"exit status": done.returncode, "last words": done.stderr.strip()[-300:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
