"""Memory: the peak of a steady backward over eager's, for a model with hundreds of MiB of activations.

Counted in three ways: bytes that torch's CPU allocator handed out (exact), bytes resident in the process (all
that the backward really took of the host, by whatever allocator), and on a GPU, bytes of device memory
allocated.
"""

from __future__ import annotations

from typing import ClassVar

from .fresh import measure
from .subjects import DEVICES, present, require

SUBJECTS = ("retrograd-eager", "retrograd-inductor")
COUNTERS = ("allocator", "resident", *DEVICES[1:])
Peaks = dict[str, dict[str, int]]


class PeakOfBackward:
    """Peak memory of the backward of a 4-layer transformer, d=64, eager forward. Goal: ratio <= 1.10."""

    params: ClassVar = [SUBJECTS, COUNTERS]
    param_names: ClassVar = ["subject", "counter"]
    timeout = 300

    def setup_cache(self) -> Peaks:
        """Measure eager and every subject, each in a fresh process."""
        peaks: Peaks = {}
        for subject in present(["eager", *SUBJECTS]):
            for device in DEVICES:
                peaks.setdefault(subject, {}).update(measure("peak_memory", subject=subject, device=device))
        return peaks

    def setup(self, peaks: Peaks, subject: str, counter: str) -> None:
        """Leave out what is not here."""
        require(subject in peaks, subject)

    def track_ratio(self, peaks: Peaks, subject: str, counter: str) -> float:
        """The subject's peak over eager's."""
        return peaks[subject][counter] / peaks["eager"][counter]

    def track_bytes(self, peaks: Peaks, subject: str, counter: str) -> int:
        """The subject's peak."""
        return peaks[subject][counter]

    setup_cache.timeout = 600  # type: ignore[attr-defined]
    track_ratio.unit = "subject / eager"  # type: ignore[attr-defined]
    track_bytes.unit = "bytes"  # type: ignore[attr-defined]
