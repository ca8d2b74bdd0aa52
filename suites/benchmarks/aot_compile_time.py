"""Compile time of functions with their backward: capture and partition, up to the backend's own compile."""

from __future__ import annotations

from typing import ClassVar

from .fresh import measure
from .subjects import DEVICES, present, require

SUBJECTS = ("retrograd-aot-trace", "stock-aot")
OURS, STOCK = SUBJECTS
Seconds = dict[str, dict[str, float]]


class CaptureAndPartition:
    """Both graphs of a 12-layer transformer, d=64, against stock AOTAutograd. Goal: ratio to stock's <= 1."""

    params: ClassVar = [DEVICES]
    param_names: ClassVar = ["device"]
    timeout = 300

    def setup_cache(self) -> Seconds:
        """Measure both in one fresh process, taking turns."""
        if OURS not in present([OURS]):
            return {}
        return {
            device: measure("aot_capture_partition", cold=True, subject=OURS, beside=STOCK, device=device)
            for device in DEVICES
        }

    def setup(self, seconds: Seconds, device: str) -> None:
        """Leave out commits without retrograd."""
        require(device in seconds, "retrograd")

    def track_ratio(self, seconds: Seconds, device: str) -> float:
        """retrograd's time over stock's."""
        return seconds[device][OURS] / seconds[device][STOCK]

    def track_seconds(self, seconds: Seconds, device: str) -> float:
        """retrograd's time."""
        return seconds[device][OURS]

    setup_cache.timeout = 300  # type: ignore[attr-defined]
    track_ratio.unit = "retrograd / stock"  # type: ignore[attr-defined]
    track_seconds.unit = "s"  # type: ignore[attr-defined]
