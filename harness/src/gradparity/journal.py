"""journal: what a campaign writes down as it goes, so that it can go on where it was killed.

In: a store, a plan in plain data. Out: the units of work that are still to be done, and the rows that are
there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gradparity.executors.unit import Unit
from gradparity.store.store import Run, Store
from gradparity.verdict import Row


def unit_name(unit: Unit) -> str:
    """What a unit is called in a store: its subject, corpus and chunk."""
    task = unit.payload
    return f"{task['subject']} {task['corpus']}::{task['chunk']}"


class Journal:
    """One run in a store. `continued` says whether the run had begun before."""

    def __init__(self, store: Store, campaign: str, plan: dict[str, Any], versions: dict[str, str]) -> None:
        self._store = store
        self.run: Run
        self.run, self.continued = store.begin(campaign, plan, versions)
        self._done = store.finished_units(self.run.id)
        self._steps: defaultdict[str, int] = defaultdict(lambda: -1)
        self._rows: list[Row] = []
        for unit, step, row in store.steps(self.run.id):
            self._steps[unit] = max(self._steps[unit], step)
            self._rows.append(row)

    def rows(self) -> list[Row]:
        """The rows that an earlier process wrote."""
        return list(self._rows)

    def errors(self) -> list[str]:
        """Why units ended before their first step."""
        return [f"{unit}: {error}" for unit, error in self._done.items() if error]

    def rest(self, unit: Unit) -> Unit | None:
        """What is left of a unit; None if nothing is."""
        name = unit_name(unit)
        return None if name in self._done else unit.after(self._steps[name])

    def write(self, unit: Unit, step: int, row: Row) -> None:
        """Keeps a row."""
        self._store.add(self.run.id, unit_name(unit), step, row)

    def finish_unit(self, unit: Unit, error: str = "") -> None:
        """Keeps that a unit is done."""
        self._store.finish_unit(self.run.id, unit_name(unit), error)

    def finish(self) -> None:
        """Keeps that the run is complete."""
        self._store.finish(self.run.id)

    def flush(self) -> None:
        """Writes what waits."""
        self._store.flush()

    @property
    def unwritten(self) -> list[Row]:
        """Rows that could not be written."""
        return self._store.unwritten
