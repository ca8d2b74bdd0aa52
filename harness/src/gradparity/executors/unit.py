"""What executors run and what they give back.

In: a `Unit` of plain data. Out: messages: `Started`, `Result`, `Finished`, `Lost`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gradparity.errors import GradparityError


@dataclass(frozen=True)
class Unit:
    """A stretch of numbered steps run by one worker.

    `payload` is plain data for the function that runs it; steps before `start` are left out; `timeout` is for
    one step, and `overhead` is allowed on top for loading, before the first step.
    """

    payload: dict[str, Any]
    timeout: float
    start: int = 0
    overhead: float = 120.0

    def after(self, step: int) -> Unit:
        """The rest of the unit, after this step."""
        return replace(self, start=step + 1)


@dataclass(frozen=True)
class Started:
    """A step begins, or a part of one. `label` says which, for messages about losses; its "limit", if it has
    one, is how many seconds this part may take, in the place of the unit's timeout.
    """

    unit: Unit
    step: int
    label: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A step's result."""

    unit: Unit
    step: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The unit has no more steps. `error`: why it ended before its first step, if it did."""

    unit: Unit
    error: str = ""


@dataclass(frozen=True)
class Lost:
    """A worker died or was killed during a step (None: before the first). `why` is "crash",
    "timeout" or "out-of-memory".
    """

    unit: Unit
    step: int | None
    label: dict[str, Any] | None
    why: str
    detail: str


Message = Started | Result | Finished | Lost
Emit = Callable[[str, int, dict[str, Any]], None]
RunUnit = Callable[[Unit, Emit], bool]
"""Runs a unit: calls emit("start", step, label) and emit("result", step, data) for each step. Returns
whether the process is still fit for another unit; False asks for a new one, and the rest of the unit runs
there.
"""


def why(error: Exception) -> str:
    """What is said of a unit that could not be set up: errors of gradparity's own speak for themselves."""
    return str(error) if isinstance(error, GradparityError) else f"{type(error).__name__}: {error}"
