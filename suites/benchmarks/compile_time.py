"""Compile time: the first backward of a process, eager forward, caches off, up to the backend's own compile.

Stock compiled autograd comes to that point through Dynamo and AOTAutograd (backend `aot_eager`). It lifts
every size into a symbol by default; `static` is the same with no symbol at all, its fastest way.
"""

from __future__ import annotations

from typing import ClassVar

from .fresh import measure
from .subjects import present, require

STOCK = {"default": "stock-aot_eager", "static": "stock-aot_eager-static"}
SUBJECTS = ("retrograd-trace", *STOCK.values())
Seconds = dict[str, float]


class FirstBackward:
    """Capture and tracing of the backward of a 4-layer transformer, d=64. Goal: ratio to stock's <= 0.1."""

    params: ClassVar = [tuple(STOCK)]
    param_names: ClassVar = ["stock"]
    timeout = 300

    def setup_cache(self) -> Seconds:
        """Measure every subject once, one after the other, each in a fresh process."""
        subjects = present(SUBJECTS)
        return {subject: measure("first_backward", cold=True, subject=subject) for subject in subjects}

    def setup(self, seconds: Seconds, stock: str) -> None:
        """Leave out commits without retrograd."""
        require("retrograd-trace" in seconds, "retrograd")

    def track_ratio(self, seconds: Seconds, stock: str) -> float:
        """retrograd's time over stock's."""
        return seconds["retrograd-trace"] / seconds[STOCK[stock]]

    def track_stock(self, seconds: Seconds, stock: str) -> float:
        """Stock's time."""
        return seconds[STOCK[stock]]

    def track_retrograd(self, seconds: Seconds, stock: str) -> float:
        """retrograd's time; the same whatever stock does."""
        return seconds["retrograd-trace"]

    setup_cache.timeout = 300  # type: ignore[attr-defined]
    track_ratio.unit = "retrograd / stock"  # type: ignore[attr-defined]
    track_stock.unit = track_retrograd.unit = "s"  # type: ignore[attr-defined]
