"""The live view of a campaign: progress, time left, verdicts so far, the last finds; plain lines where
output is no terminal.

In: where a campaign stands, after each message. Out: something on the console.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from gradparity import report
from gradparity.verdict import Row

EVERY = 10.0
"""Seconds between two plain lines."""
SHOWN = 5
"""How many of the last finds a terminal shows."""


class Campaign(Protocol):
    """As much of a campaign as a view shows."""

    @property
    def total(self) -> float | None:
        """How much there is to do; None: nobody knows."""

    @property
    def completed(self) -> float:
        """How much of it is done."""

    @property
    def found(self) -> Sequence[Row]:
        """The finds, the last one last."""

    def describe(self) -> str:
        """One line."""


class View:
    """Tells where a campaign stands: in a bar, or in a line now and then."""

    def __init__(self, console: Console, live: Live | None = None, every: float = EVERY) -> None:
        self._console, self._live, self._every = console, live, every
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=None)
        self._next = time.monotonic() + every

    def __call__(self, campaign: Campaign) -> None:
        """Tells, if it is time."""
        if self._live is not None:
            self._progress.update(self._task, total=campaign.total, completed=campaign.completed)
            finds = (report.line(row) for row in campaign.found[-SHOWN:])
            self._live.update(Group(self._progress, Text(campaign.describe()), *finds))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._console.print(campaign.describe(), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watching(console: Console) -> Iterator[View]:
    """The view that suits this console."""
    if not console.is_terminal:
        yield View(console)
        return
    with Live(console=console, transient=True) as live:
        yield View(console, live)
