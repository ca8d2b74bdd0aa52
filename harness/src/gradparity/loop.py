"""loop: the one loop of every campaign.

In: a source of cases, where its units run, a run in a store. Out: entries for the source to count, each
written to the store first; how the campaign ended. A campaign that continues first counts what an earlier
process wrote, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from gradparity.errors import StoreError
from gradparity.executors.registry import Resources, executor
from gradparity.executors.unit import Message, RunUnit, Unit
from gradparity.reading import written_by_us
from gradparity.store.store import Entry, Progress
from gradparity.verdict import Row


class Source(Protocol):
    """Where a campaign's cases come from, and what it counts of them."""

    @property
    def run_unit(self) -> RunUnit:
        """What a worker does with a unit."""

    def rounds(self) -> Iterator[list[Unit]]:
        """Units that run together; the next ones are asked for when these have ended."""

    def entries(self, message: Message) -> Iterable[Entry]:
        """What is written down of a worker's message."""

    def count(self, entry: Entry) -> None:
        """Counts an entry, a new one or one of an earlier process."""

    def is_over(self) -> bool:
        """Whether the campaign ends here, though units are left."""


@dataclass(frozen=True)
class Where:
    """Where units run: how many worker processes (0: this process), seconds until one that does not answer is
    killed, and resources.
    """

    processes: int = 2
    grace: float = 10.0
    resources: Resources = field(default_factory=Resources)


@dataclass
class Ending:
    """How a campaign ended. `interrupted`: by Ctrl-C; `broken`: why results could not be written, `unwritten`
    the rows that are not in the store.
    """

    interrupted: bool = False
    broken: str = ""
    unwritten: list[Row] = field(default_factory=list)


Listener = Callable[[Entry | None], None]
"""Hears of each message, with the entry that was made of it, if there is one."""


def through(source: Source, where: Where, listen: Listener, progress: Progress | None = None) -> Ending:
    """Runs a campaign to its end. An interrupt (Ctrl-C) ends it early; so does a store that cannot be
    written.
    """
    if progress is not None:
        with written_by_us(f"a step in {progress.store.path}", "step of this campaign", "move it away"):
            for entry in progress.entries():
                source.count(entry)
    try:
        for units in source.rounds():
            _round(source, units, where, listen, progress)
        if progress is not None:
            progress.finish()
    except KeyboardInterrupt:
        return Ending(interrupted=True)
    except StoreError as error:
        return Ending(broken=str(error), unwritten=[] if progress is None else progress.store.unwritten)
    return Ending()


def _round(
    source: Source, units: list[Unit], where: Where, listen: Listener, progress: Progress | None
) -> None:
    messages = executor(source.run_unit, where.processes, where.grace, where.resources).run(units)
    with closing(messages):  # type: ignore[type-var]
        for message in messages:
            entry = None
            for entry in source.entries(message):
                if progress is not None:
                    progress.write(entry)
                source.count(entry)
                listen(entry)
            if entry is None:
                listen(None)
            elif source.is_over():
                return
