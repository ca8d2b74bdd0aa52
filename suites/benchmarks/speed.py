"""The goals of the table of speed (`speed_table` measures all of it; here is what takes minutes)."""

from __future__ import annotations

from typing import Any, ClassVar

from .figures import Machine, Table
from .speed_goals import GOALS
from .speed_rows import chosen
from .speed_table import Run, measure_parts
from .subjects import DEVICES, leave_out, present

Found = dict[str, dict[str, Any]]

#: rows and parts by device: those whose stock takes the longest are left to `speed_table`.
ROWS = {
    "cpu": (
        "first4:retrograd",
        "first4:stock-default",
        "firststep4",
        "host-chain",
        "growth:retrograd-eager",
        "sweep-small",
        "sweep-mlp40",
    ),
    "cuda": (
        "first12:retrograd",
        "first12:stock-static",
        "firststep12",
        "steady12:live*",
        "steady12:kernels",
        "mlp40",
        "memory12",
        "warm12:retrograd",
        "sweep-*",
    ),
}
PARTS = {device: {part.id for part in chosen(device, rows)} for device, rows in ROWS.items()}
RATIOS = {
    f"{goal.title} ({device})": goal
    for device, parts in PARTS.items()
    for goal in GOALS
    if {goal.over.partition("/")[0], goal.under.partition("/")[0]} <= parts and device in goal.devices
}


class Speed:
    """Ratios of the table of speed, each of parts measured in fresh processes of one run."""

    params: ClassVar = [[title for title in RATIOS if title.endswith(tuple(f"({name})" for name in DEVICES))]]
    param_names: ClassVar = ["ratio"]
    timeout = 300

    def setup_cache(self) -> Found:
        """Measure every part once: ratios by title, and the reasons of parts that have no figures."""
        found: Found = {"ratios": {}, "missing": {}}
        for device in DEVICES if present(["retrograd"]) else ():
            parts = chosen(device, ROWS[device])
            table = measure_parts(parts, Run("asv", device, seconds_left=3600.0), Table(Machine.here(device)))
            found["missing"] |= table.missing
            found["ratios"] |= {f"{ratio.goal.title} ({device})": ratio.value for ratio in table.ratios()}
        return found

    def setup(self, found: Found, ratio: str) -> None:
        """Leave out what has no figures, with the reason."""
        if ratio not in found["ratios"]:
            parts = [figure.partition("/")[0] for figure in (RATIOS[ratio].over, RATIOS[ratio].under)]
            leave_out("\n".join(found["missing"].get(part, f"no figures of {part} here") for part in parts))

    def track_ratio(self, found: Found, ratio: str) -> float:
        """The ratio."""
        return found["ratios"][ratio]

    setup_cache.timeout = 3600  # type: ignore[attr-defined]
    track_ratio.unit = "ratio"  # type: ignore[attr-defined]
