"""A table of speed as Markdown, for people: `python -m benchmarks.render FILE`.

In: the file of `speed_table`. Out: the goals with what was measured, then all other figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .figures import Ratio, Table
from .markdown import markdown
from .speed_goals import STEADY_LIMIT
from .training_table import render as trainings

#: what a figure of each unit is shown in: the first whose factor it reaches.
SCALES = {
    "s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)),
    "B": (("GiB", 2.0**30), ("MiB", 2.0**20), ("B", 1.0)),
    "1": (("", 1.0),),
}


def render(table: Table) -> str:
    """The whole text."""
    machine, ratios = table.machine, list(table.ratios())
    name = machine.name if machine.device == "cuda" else f"CPU ({machine.name}, {machine.cores} cores)"
    blocks = [f"{name}, torch {machine.torch}, Python {machine.python}"]
    if ratios:
        rows = [_row(ratio) for ratio in ratios]
        blocks.append(markdown(("measure", "ratio", "goal", "", "measured", "against"), rows))
    if worst := worst_steady(ratios):
        blocks.append(f"Worst of all that is steady: {worst.value:.2f} ({worst.goal.title}).")
    if any(len(ratio.runs) > 1 for ratio in ratios):
        blocks.append("† Its two figures are from two runs on such a machine.")
    if any(ratio.goal.yardstick for ratio in ratios):
        blocks.append("‡ Each figure was first divided by eager's in the same process.")
    blocks += trainings(table)
    if figures := list(_figures(table)):
        blocks.append(markdown(("part", "figures"), figures))
    if table.missing:
        lines = [f"- {part}: {why.splitlines()[-1]}" for part, why in table.missing.items()]
        blocks.append("Not measured:\n\n" + "\n".join(lines))
    return "\n\n".join([*blocks, *table.notes]) + "\n"


def worst_steady(ratios: Iterable[Ratio]) -> Ratio | None:
    """The largest ratio of those that must stay within `STEADY_LIMIT`."""
    steady = [ratio for ratio in ratios if ratio.goal.at_most == STEADY_LIMIT]
    return max(steady, key=lambda ratio: ratio.value, default=None)


def _row(ratio: Ratio) -> tuple[str, ...]:
    limit, met = ratio.goal.at_most, ratio.is_met
    return (
        ratio.goal.title,
        _number(ratio.value) + ("†" if len(ratio.runs) > 1 else "") + ("‡" if ratio.goal.yardstick else ""),
        "" if limit is None else f"≤ {_limit(limit)}",
        "" if met is None else "yes" if met else "**no**",
        quantity(ratio.over, ratio.unit),
        quantity(ratio.under, ratio.unit),
    )


def _limit(limit: float) -> str:
    whole = round(1 / limit)
    return f"1/{whole}" if whole > 1 and abs(limit * whole - 1) < 1e-9 else f"{limit:g}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 or 0.99 < value < 1.01 else f"{value:.2f}"


def quantity(value: float, unit: str) -> str:
    """A figure with the unit that suits it."""
    scales = SCALES[unit]
    name, factor = next((scale for scale in scales if value >= scale[1]), scales[-1])
    shown = value / factor
    text = f"{shown:.0f}" if unit == "1" or shown >= 100 else f"{shown:.3g}"
    return f"{text} {name}".rstrip()


def _figures(table: Table) -> Iterable[Sequence[str]]:
    for part, measured in table.parts.items():
        if measured.unit == "":
            continue  # several units: it has a table of its own
        beside = f" (one of {measured.jobs} at once)" if measured.jobs > 1 else ""
        shown = "; ".join(
            f"{name} {quantity(value, '1' if name == 'nodes' else measured.unit)}"
            for name, value in measured.figures.items()
        )
        yield part + beside, shown


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(render(Table.of_json(Path(name).read_text())))
