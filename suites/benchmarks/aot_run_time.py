"""Run time and memory of compiled functions with their backward, beside eager and stock in one process."""

from __future__ import annotations

from typing import ClassVar

from .fresh import measure
from .subjects import DEVICES, present, require

SUBJECTS = (
    "retrograd-aot-eager",
    "retrograd-aot-trace",
    "retrograd-aot-inductor",
    "stock-aot",
    "stock-compile-aot_eager",
    "stock-compile-inductor",
)
Figures = dict[str, dict[str, float]]


class ForwardOverhead:
    """What a compiled call of five lines on 8 elements takes besides eager's time. Goal: half of stock's."""

    params: ClassVar = [
        ("retrograd-aot-eager", "retrograd-aot-trace"),
        ("stock-compile-aot_eager", "stock-aot"),
    ]
    param_names: ClassVar = ["subject", "stock"]
    timeout = 300

    def setup_cache(self) -> Figures:
        """Measure every pair in a fresh process, taking turns."""
        return {
            f"{subject} {stock}": measure("aot_forward_overhead", subject=subject, beside=stock)
            for subject in present(self.params[0])
            for stock in self.params[1]
        }

    def setup(self, seconds: Figures, subject: str, stock: str) -> None:
        """Leave out what is not here."""
        require(f"{subject} {stock}" in seconds, subject)

    def track_ratio(self, seconds: Figures, subject: str, stock: str) -> float:
        """The subject's time over eager's, divided by stock's over eager's."""
        measured = seconds[f"{subject} {stock}"]
        return (measured[subject] - measured["eager"]) / (measured[stock] - measured["eager"])

    def track_microseconds(self, seconds: Figures, subject: str, stock: str) -> float:
        """The subject's time of a call."""
        return seconds[f"{subject} {stock}"][subject] * 1e6

    setup_cache.timeout = 300  # type: ignore[attr-defined]
    track_ratio.unit = "added time, subject / stock"  # type: ignore[attr-defined]
    track_microseconds.unit = "us"  # type: ignore[attr-defined]


class SteadyStep:
    """A warm forward and backward of a 4-layer transformer through Inductor. Goal: within 5 % of stock's."""

    params: ClassVar = [DEVICES]
    param_names: ClassVar = ["device"]
    timeout = 600

    def setup_cache(self) -> Figures:
        """Measure both in one fresh process, taking turns."""
        return {
            device: measure("aot_steady_step", subject=subject, device=device)
            for subject in present(["retrograd-aot-inductor"])
            for device in DEVICES
        }

    def setup(self, seconds: Figures, device: str) -> None:
        """Leave out commits without retrograd."""
        require(device in seconds, "retrograd")

    def track_ratio(self, seconds: Figures, device: str) -> float:
        """retrograd's time over stock's."""
        return seconds[device]["retrograd-aot-inductor"] / seconds[device]["stock-compile-inductor"]

    def track_milliseconds(self, seconds: Figures, device: str) -> float:
        """retrograd's time."""
        return seconds[device]["retrograd-aot-inductor"] * 1000

    setup_cache.timeout = 600  # type: ignore[attr-defined]
    track_ratio.unit = "retrograd / stock"  # type: ignore[attr-defined]
    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]


class PeakOfStep:
    """Peak memory of a warm forward and backward with large activations. Goal: within 5 % of eager's."""

    params: ClassVar = [("retrograd-aot-eager", "retrograd-aot-inductor"), DEVICES]
    param_names: ClassVar = ["subject", "device"]
    timeout = 600

    def setup_cache(self) -> Figures:
        """Measure each subject beside eager in a fresh process."""
        return {
            f"{subject} {device}": measure("aot_peak_memory", subject=subject, device=device)
            for subject in present(self.params[0])
            for device in DEVICES
        }

    def setup(self, peaks: Figures, subject: str, device: str) -> None:
        """Leave out what is not here."""
        require(f"{subject} {device}" in peaks, subject)

    def track_ratio(self, peaks: Figures, subject: str, device: str) -> float:
        """The subject's peak over eager's."""
        measured = peaks[f"{subject} {device}"]
        return measured[subject] / measured["eager"]

    setup_cache.timeout = 600  # type: ignore[attr-defined]
    track_ratio.unit = "subject / eager"  # type: ignore[attr-defined]
