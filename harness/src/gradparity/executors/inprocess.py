"""The executor without processes: everything runs here, one unit after the other.

In: a function and units. Out: messages. A crash ends the run; a hang is ended by the alarm only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradparity.executors.unit import Finished, Message, Result, RunUnit, Started, Unit


class InProcess:
    """Runs units in the calling process."""

    def __init__(self, run_unit: RunUnit) -> None:
        self._run_unit = run_unit

    def run(self, units: Iterable[Unit]) -> Iterator[Message]:
        """All messages of all units, in order; those of one unit come when it is done."""
        for unit in units:
            yield from self._unit(unit)

    def _unit(self, unit: Unit) -> Iterator[Message]:
        fit = False
        while not fit:
            messages: list[Message] = []
            fit = self._run_unit(unit, _recorder(unit, messages))
            yield from messages
            steps = [message.step for message in messages if isinstance(message, Result)]
            if not steps:
                break
            unit = unit.after(steps[-1])
        yield Finished(unit)


def _recorder(unit: Unit, messages: list[Message]) -> Any:
    def emit(kind: str, step: int, data: dict[str, Any]) -> None:
        messages.append(Started(unit, step, data) if kind == "start" else Result(unit, step, data))

    return emit
