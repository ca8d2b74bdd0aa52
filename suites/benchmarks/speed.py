"""The goals of the table of speed (`speed_table` measures all of it; here is what takes minutes)."""

from __future__ import annotations

from typing import Any, ClassVar

from .figures import Machine, Table
from .speed_goals import GOALS
from .speed_rows import chosen
from .speed_table import Run, measure_parts
from .subjects import DEVICES, present, require

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

    params: ClassVar = [list(RATIOS)]
    param_names: ClassVar = ["ratio"]
    timeout = 300

    def setup_cache(self) -> dict[str, dict[str, float]]:
        """Measure every part once: its ratio and the figure over the line, by title."""
        found: dict[str, dict[str, float]] = {}
        for device in DEVICES if present(["retrograd"]) else ():
            run = Run("asv", device, seconds_left=3600.0)
            table = measure_parts(chosen(device, ROWS[device]), run, Table(Machine.here(device)))
            for ratio in table.ratios():
                found[f"{ratio.goal.title} ({device})"] = {"ratio": ratio.value, "over": ratio.over}
        return found

    def setup(self, found: dict[str, Any], ratio: str) -> None:
        """Leave out what is not here, above all what needs a GPU."""
        require(ratio in found, ratio)

    def track_ratio(self, found: dict[str, Any], ratio: str) -> float:
        """The ratio."""
        return found[ratio]["ratio"]

    def track_over(self, found: dict[str, Any], ratio: str) -> float:
        """What is compared: seconds, or bytes or objects where the title says so."""
        return found[ratio]["over"]

    setup_cache.timeout = 3600  # type: ignore[attr-defined]
    track_ratio.unit = "ratio"  # type: ignore[attr-defined]
    track_over.unit = "s, bytes or objects"  # type: ignore[attr-defined]
