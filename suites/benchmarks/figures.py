"""What runs of the table found: one JSON file, from one run or merged from several of one machine.

In: figures by part. Out: `Table`, from and to JSON, with the ratios that its figures give.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .speed_goals import GOALS, Goal


class TableError(ValueError):
    """Files that cannot be one table."""


@dataclass(frozen=True)
class Machine:
    """Where figures were measured: they are compared only with others from the same."""

    device: str
    name: str
    torch: str
    python: str
    cores: int

    @staticmethod
    def here(device: str) -> Machine:
        """This one."""
        name = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
        cores = len(os.sched_getaffinity(0))
        return Machine(device, name, torch.__version__, platform.python_version(), cores)


@dataclass(frozen=True)
class Measured:
    """The figures of one part, with the run that they are from and how many parts ran beside it."""

    figures: dict[str, float]
    unit: str
    run: str
    jobs: int = 1


@dataclass(frozen=True)
class Ratio:
    """A goal with what was measured."""

    goal: Goal
    over: float
    under: float
    unit: str
    runs: tuple[str, ...]
    yardsticks: tuple[float, float] = (1.0, 1.0)

    @property
    def value(self) -> float:
        """The ratio."""
        return self.over / self.yardsticks[0] / (self.under / self.yardsticks[1])

    @property
    def is_met(self) -> bool | None:
        """Whether it is within its limit; None without one."""
        return None if self.goal.at_most is None else self.value <= self.goal.at_most


@dataclass
class Table:
    """All that is known of one machine.

    Attributes:
        machine: where.
        parts: figures by part's id.
        missing: why a part has none.
        notes: what a reader must know besides.
    """

    machine: Machine
    parts: dict[str, Measured] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def figure(self, name: str) -> float | None:
        """The figure called "ROW:NAME/FIGURE"."""
        part, _, label = name.partition("/")
        measured = self.parts.get(part)
        return None if measured is None else measured.figures.get(label)

    def ratios(self) -> Iterable[Ratio]:
        """Every goal whose two figures are here."""
        for goal in GOALS:
            over, under = self.figure(goal.over), self.figure(goal.under)
            if self.machine.device in goal.devices and over is not None and under:
                yield self._ratio(goal, over, under)

    def _ratio(self, goal: Goal, over: float, under: float) -> Ratio:
        parts = [self.parts[name.partition("/")[0]] for name in (goal.over, goal.under)]
        runs = tuple(dict.fromkeys(part.run for part in parts))
        if not goal.yardstick:
            return Ratio(goal, over, under, parts[0].unit, runs)
        first, second = (part.figures[goal.yardstick] for part in parts)
        return Ratio(goal, over, under, parts[0].unit, runs, (first, second))

    def to_json(self) -> str:
        """The file's text; ratios stand in it for readers, and are computed anew when it is read."""
        ratios = [
            {
                "title": ratio.goal.title,
                "over": ratio.goal.over,
                "under": ratio.goal.under,
                "ratio": ratio.value,
                "at_most": ratio.goal.at_most,
                "is_met": ratio.is_met,
            }
            for ratio in self.ratios()
        ]
        return json.dumps({**asdict(self), "ratios": ratios}, indent=1) + "\n"

    @staticmethod
    def of_json(text: str) -> Table:
        """Read what `to_json` wrote."""
        told: dict[str, Any] = json.loads(text)
        parts = {name: Measured(**measured) for name, measured in told["parts"].items()}
        return Table(Machine(**told["machine"]), parts, told["missing"], told["notes"])


def merged(paths: Iterable[Path]) -> Table:
    """One table of several files; where two have figures for one part, those of the later file.

    Raises: TableError for files of different machines or versions.
    """
    tables = [Table.of_json(path.read_text()) for path in paths]
    whole = Table(tables[0].machine)
    for table in tables:
        if table.machine != whole.machine:
            raise TableError(f"figures of two machines: {whole.machine} and {table.machine}")
        whole.parts |= table.parts
        whole.missing |= table.missing
        whole.notes += [note for note in table.notes if note not in whole.notes]
    whole.missing = {part: why for part, why in whole.missing.items() if part not in whole.parts}
    return whole
