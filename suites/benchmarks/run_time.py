"""Run time: a steady backward against eager's, taking turns with it in one process."""

from __future__ import annotations

from typing import ClassVar

from .fresh import measure
from .subjects import DEVICES, present, require

SUBJECTS = ("retrograd-eager", "retrograd-inductor", "stock-aot_eager-static")
Seconds = dict[str, dict[str, dict[str, float]]]


class SteadyBackward:
    """Median time of a warm backward of a 4-layer transformer, d=64, eager forward."""

    params: ClassVar = [SUBJECTS, DEVICES]
    param_names: ClassVar = ["subject", "device"]
    timeout = 300

    def setup_cache(self) -> Seconds:
        """Measure every subject together with eager, one fresh process each, on each device."""
        return {
            subject: {
                device: measure("steady_backward", subject=subject, device=device) for device in DEVICES
            }
            for subject in present(SUBJECTS)
        }

    def setup(self, seconds: Seconds, subject: str, device: str) -> None:
        """Leave out what is not here."""
        require(subject in seconds, subject)

    def track_ratio(self, seconds: Seconds, subject: str, device: str) -> float:
        """The subject's time over eager's."""
        measured = seconds[subject][device]
        return measured[subject] / measured["eager"]

    def track_milliseconds(self, seconds: Seconds, subject: str, device: str) -> float:
        """The subject's time."""
        return seconds[subject][device][subject] * 1000

    setup_cache.timeout = 600  # type: ignore[attr-defined]
    track_ratio.unit = "subject / eager"  # type: ignore[attr-defined]
    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]
