"""The live view of a campaign: progress, time left, verdicts so far, the last finds; plain lines where
output is no terminal.

In: what a campaign tells its listener. Out: something on the console.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from gradparity import report
from gradparity.verdict import Row

EVERY = 10.0
"""Seconds between two plain lines."""


class Tally:
    """What there is to tell at any moment."""

    def __init__(self) -> None:
        self.total = self.done = self.cases = self.finds = 0
        self.verdicts: Counter[str] = Counter()
        self.last: deque[Row] = deque(maxlen=5)
        self.began = time.monotonic()

    def add(self, row: Row) -> None:
        """Counts a row."""
        self.cases += 1
        self.verdicts[report.column(row)] += 1
        if row.is_find:
            self.finds += 1
            self.last.append(row)

    def describe(self) -> str:
        """One line."""
        counted = ", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())
        return f"{self.cases} cases: {counted or 'none yet'}; {self.finds} divergences"

    def seconds_left(self) -> float | None:
        """By the units so far; None before the first is done."""
        if not self.done:
            return None
        return (time.monotonic() - self.began) / self.done * (self.total - self.done)


class Plain:
    """A listener that prints a line now and then."""

    def __init__(self, console: Console, every: float = EVERY) -> None:
        self._console, self._every = console, every
        self._tally, self._next = Tally(), time.monotonic() + every

    def units(self, total: int) -> None:
        """How many units there are."""
        self._tally.total = total

    def unit_done(self) -> None:
        """A unit is finished."""
        self._tally.done += 1
        self._tell()

    def row(self, row: Row) -> None:
        """A row is there."""
        self._tally.add(row)
        self._tell()

    def _tell(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        left = self._tally.seconds_left()
        time_left = "" if left is None else f", about {left:.0f} s left"
        text = f"{self._tally.done}/{self._tally.total} units{time_left}; {self._tally.describe()}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Screen:
    """A listener that redraws a few lines of the terminal."""

    def __init__(self, progress: Progress, live: Live) -> None:
        self._progress, self._live = progress, live
        self._task = progress.add_task("loading", total=None)
        self._tally = Tally()

    def units(self, total: int) -> None:
        """How many units there are."""
        self._tally.total = total
        self._progress.update(self._task, total=total)

    def unit_done(self) -> None:
        """A unit is finished."""
        self._tally.done += 1
        self._progress.advance(self._task)

    def row(self, row: Row) -> None:
        """A row is there."""
        self._tally.add(row)
        self._progress.update(self._task, description=f"{row.subject}  {row.case}")
        self._live.update(drawn(self._progress, self._tally))


def drawn(progress: Progress, tally: Tally) -> Group:
    """The bar, the counts, the last finds."""
    return Group(progress, Text(tally.describe()), *(report.line(row) for row in tally.last))


@contextmanager
def watching(console: Console) -> Iterator[Plain | Screen]:
    """The listener that suits this console."""
    if not console.is_terminal:
        yield Plain(console)
        return
    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
    )
    with Live(progress, console=console, transient=True) as live:
        yield Screen(progress, live)
