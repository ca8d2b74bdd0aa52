"""The two actors of a Ray campaign: the mailbox beside the controller, and the worker.

In: units. Out: what happens in them, put into the mailbox before the next step begins.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from gradparity.executors.unit import RunUnit, Unit, why
from gradparity.executors.worker import MEMORY_LIMIT_KIB

Said = tuple[int, str, int, dict[str, Any]]
"""Attempt, kind, step, data."""


class Mailbox:
    """Keeps what workers say until the controller takes it."""

    def __init__(self) -> None:
        self._said: list[Said] = []

    def put(self, said: Said) -> None:
        """Keeps one message."""
        self._said.append(said)

    def take(self) -> list[Said]:
        """All messages that were not yet taken."""
        said, self._said = self._said, []
        return said


class Worker:
    """Runs units one after the other in a process of its own."""

    def __init__(self, run_unit: RunUnit, mailbox: Any) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        torch.set_num_threads(1)
        self._run_unit, self._mailbox = run_unit, mailbox

    def ready(self) -> bool:
        """Answers once the process is there."""
        return True

    def serve(self, unit: Unit, attempt: int) -> tuple[bool, str]:
        """Runs a unit. Returns whether the process is fit for another, and why the unit could not be run."""
        import ray

        def emit(kind: str, step: int, data: dict[str, Any]) -> None:
            ray.get(self._mailbox.put.remote((attempt, kind, step, data)))

        try:
            fit = self._run_unit(unit, emit)
        except Exception as error:  # a unit that cannot even be set up is reported, not fatal
            return False, why(error)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return fit and used <= MEMORY_LIMIT_KIB, ""
