"""Whole training steps for asv: compile time, run time and memory of each way to compile each model.

The parameter is any model of `speed_table`. All of them take hours, so there are two, or those that the
environment variable `BENCHMARK_MODELS` names, with commas between; `all` for all.
"""

from __future__ import annotations

import os
from typing import ClassVar

from .fresh import MeasurementError, measure_cold_and_warm
from .subjects import DEVICES, leave_out, present
from .trained_models import TRAINED
from .training import WAYS

CHOSEN = os.environ.get("BENCHMARK_MODELS", "")
MODELS = [*TRAINED] if CHOSEN == "all" else (CHOSEN or "gpt2,resnet50").split(",")
#: what a GPU compiles in a minute takes a CPU ten.
ON_CPU = ("gpt2",)
Found = dict[str, dict[str, dict[str, float]] | str]


class Training:
    """AdamW on three batches in turn. Parameters of another device, or of a missing package, say so."""

    params: ClassVar = [MODELS, list(WAYS), ["cpu", "cuda"]]
    param_names: ClassVar = ["model", "way", "device"]
    timeout = 300

    def setup_cache(self) -> Found:
        """Measure everything once, each in fresh processes with empty and with full caches."""
        return {
            f"{model} {way} {device}": _measured(model, way, device)
            for model in MODELS
            for way in present(list(WAYS))
            for device in DEVICES
        }

    def setup(self, found: Found, model: str, way: str, device: str) -> None:
        """Leave out what has no figures, with the reason."""
        figures = found.get(f"{model} {way} {device}", f"{way} on {device} cannot run here")
        if isinstance(figures, str):
            leave_out(figures)

    def track_step(self, found: Found, model: str, way: str, device: str) -> float:
        """A steady step."""
        return _figure(found, model, way, device, "warm", "step") * 1e3

    def track_cold_start(self, found: Found, model: str, way: str, device: str) -> float:
        """The first three steps of a process with empty caches."""
        return _figure(found, model, way, device, "cold", "start")

    def track_warm_start(self, found: Found, model: str, way: str, device: str) -> float:
        """The first three steps of a process with full caches."""
        return _figure(found, model, way, device, "warm", "start")

    def track_reserved(self, found: Found, model: str, way: str, device: str) -> float:
        """Peak of reserved memory in steady steps; none is counted on a CPU."""
        return _figure(found, model, way, device, "warm", "reserved")

    setup_cache.timeout = 7200  # type: ignore[attr-defined]
    track_step.unit = "ms"  # type: ignore[attr-defined]
    track_cold_start.unit = track_warm_start.unit = "s"  # type: ignore[attr-defined]
    track_reserved.unit = "bytes"  # type: ignore[attr-defined]


def _measured(model: str, way: str, device: str) -> dict[str, dict[str, float]] | str:
    if model not in TRAINED:
        return f"BENCHMARK_MODELS names {model!r}; there are {', '.join(TRAINED)}"
    if not TRAINED[model].is_here:
        return f"{TRAINED[model].package} is not installed"
    if device == "cpu" and model not in ON_CPU and not CHOSEN:
        return f"{model} is measured on a GPU"
    if device == "cpu" and way.endswith("reduce-overhead"):
        return "CUDA graphs need a GPU"
    try:
        return measure_cold_and_warm("training", limit=600, subject=way, model=model, device=device)
    except MeasurementError as error:
        return str(error)


def _figure(found: Found, model: str, way: str, device: str, when: str, name: str) -> float:
    figures = found[f"{model} {way} {device}"]
    assert not isinstance(figures, str), "setup leaves these out"
    return figures[when].get(name, float("nan"))
