"""The rows of the table of speed: which measurements each is made of (what they must show: `speed_goals`).

In: nothing. Out: `PARTS`, each one fresh process with the id "ROW:NAME".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from .trained_models import TRAINED
from .training import WAYS

BOTH, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)
REAL = ("gpt2", "bert", "resnet50")
TOGETHER = ("eager", "stock-like-eager", "retrograd-compile", "retrograd-compile-whole", "retrograd-live")
SWEEP = ("small", "deep", "wide", "mlp40-narrow", "mlp40", "mlp40-large", "transformer12")


@dataclass(frozen=True)
class Part:
    """What one fresh process measures.

    Attributes:
        row, name: together its id.
        measurement, arguments: of `measure`, or of `speed_table.IN_TURNS`.
        caches: of compiled code: none, the user's own, or first empty and then filled (two processes).
        devices: where it is measured.
        needs: the name of the model, if it is one that must be installed; "train-NAME" for `trained_models`.
        is_long: what stock needs minutes to compile: such parts may be measured beside one another.
        unit: of its figures.
    """

    row: str
    name: str
    measurement: str
    arguments: Mapping[str, Any]
    caches: Literal["none", "own", "filled"] = "own"
    devices: tuple[str, ...] = BOTH
    needs: str = ""
    is_long: bool = False
    unit: str = "s"

    @property
    def id(self) -> str:
        """What selects it."""
        return f"{self.row}:{self.name}"


LIVE, STOCK = "retrograd-inductor", {"default": "stock-inductor", "static": "stock-inductor-static"}
AHEAD, STOCK_AHEAD = "retrograd-compile-inductor", "stock-compile-inductor"


def first_backward(row: str, model: str, devices: tuple[str, ...] = BOTH, needs: str = "") -> list[Part]:
    """The first backward of a process behind an eager forward, without caches."""
    subjects = {
        "retrograd": LIVE,
        "retrograd-whole": f"{LIVE}-whole",
        **{f"stock-{name}": subject for name, subject in STOCK.items()},
    }
    return [
        Part(
            row,
            name,
            "first_backward",
            {"subject": subject, "model": model},
            caches="none",
            devices=devices,
            needs=needs,
            is_long=name.startswith("stock"),
        )
        for name, subject in subjects.items()
    ]


def first_step(row: str, model: str, devices: tuple[str, ...] = BOTH, needs: str = "") -> list[Part]:
    """The first forward and backward through `torch.compile`, without caches."""
    return [
        Part(
            row,
            name,
            "first_step",
            {"subject": subject, "model": model},
            caches="none",
            devices=devices,
            needs=needs,
            is_long=name == "stock",
        )
        for name, subject in {"retrograd": AHEAD, "stock": STOCK_AHEAD}.items()
    ]


def start(row: str, model: str) -> Part:
    """The first step through `torch.compile` in a process with empty caches, and in later ones, in turns."""
    arguments = {"measurement": "first_step", "subjects": [AHEAD, STOCK_AHEAD], "model": model}
    return Part(row, "compiled", "starts_in_turns", arguments)


def steady(row: str, name: str, model: str, *subjects: str, **settings: Any) -> Part:
    """Warm steps and backwards of eager and of the subjects, taking turns."""
    return Part(row, name, "steady", {"subjects": ["eager", *subjects], "model": model}, **settings)


def steady_rows() -> Iterable[Part]:
    """Twelve layers of a transformer, and the forty-layer perceptron, which is all host time."""
    yield steady("steady12", "live", "transformer12", LIVE)
    yield steady("steady12", "live-cudagraphs", "transformer12", f"{LIVE}-cudagraphs", devices=CUDA)
    yield steady("steady12", "compiled", "transformer12", STOCK_AHEAD, AHEAD)
    for name, subject in STOCK.items():
        yield steady("steady12", f"stock-{name}", "transformer12", subject, is_long=True)
    yield steady("mlp40", "live", "mlp40", LIVE)
    yield steady("mlp40", "compiled", "mlp40", STOCK_AHEAD, AHEAD)
    for name, subject in {
        "live-cudagraphs": f"{LIVE}-cudagraphs",
        "stock-reduce-overhead": f"{STOCK_AHEAD}-cudagraphs",
        "retrograd-reduce-overhead": f"{AHEAD}-cudagraphs",
    }.items():
        yield steady("mlp40", name, "mlp40", subject, devices=CUDA)
    for row, model in {"steady12": "transformer12", "mlp40": "mlp40"}.items():
        yield Part(row, "kernels", "kernel_seconds", {"model": model}, devices=CUDA)


def overhead_rows() -> Iterable[Part]:
    """Host time, memory, growth and the start with filled caches."""
    for row, model in {"host-chain": "chain", "host12": "deep"}.items():
        for subject in ("retrograd", "stock", "stock-static"):
            yield Part(row, subject, "host_time", {"subject": subject, "model": model})
    for row, model in {"memory-wide": "wide", "memory12": "transformer12"}.items():
        for subject in ("eager", "retrograd-eager", LIVE, STOCK["static"]):
            arguments = {"subject": subject, "model": model}
            yield Part(row, subject, "peak_memory", arguments, is_long=subject in STOCK.values(), unit="B")
    for subject in ("retrograd-eager", LIVE, AHEAD):
        yield Part("growth", subject, "growth", {"subject": subject}, unit="1")
    yield Part("new", "live", "cost_of_new_structures", {"subject": "retrograd-eager"}, devices=CPU)
    arguments = {"subject": "retrograd-eager-strict"}
    yield Part("new", "growth", "growth_by_structures", arguments, devices=CPU, unit="1")
    yield Part("warm12", "retrograd", "first_backward", {"subject": LIVE, "model": "transformer12"}, "filled")
    arguments = {"subject": STOCK["static"], "model": "transformer12"}
    yield Part("warm12", "stock-static", "first_backward", arguments, "filled", is_long=True)


def sweep_rows() -> Iterable[Part]:
    """Every workload, live beside eager and compiled beside stock."""
    for model in SWEEP:
        yield steady(f"sweep-{model}", "live", model, LIVE)
        yield steady(f"sweep-{model}", "compiled", model, STOCK_AHEAD, AHEAD)


def real_rows() -> Iterable[Part]:
    """Models from libraries."""
    for model in REAL:
        yield from first_backward(f"{model}-first", model, needs=model)
        yield from first_step(f"{model}-firststep", model, needs=model)
        yield steady(f"{model}-steady", "live", model, LIVE, needs=model)
        yield steady(f"{model}-steady", "compiled", model, STOCK_AHEAD, AHEAD, needs=model)
        yield Part(
            f"{model}-steady", "kernels", "kernel_seconds", {"model": model}, devices=CUDA, needs=model
        )


def training_rows() -> Iterable[Part]:
    """Whole training steps of ten models: each way in a process with empty caches and in one with full; all
    ways in turns; some in turns in one process."""
    for model in TRAINED:
        together = {"ways": TOGETHER, "model": model}
        yield Part(f"together-{model}", "step", "together", together, needs=f"train-{model}", unit="")
        for way in WAYS:
            devices = CUDA if way.endswith("-overhead") else BOTH
            arguments = {"subject": way, "model": model}
            yield Part(
                f"train-{model}", way, "training", arguments, "filled", devices, f"train-{model}", unit=""
            )
        for device in BOTH:
            ways = [way for way in WAYS if device == "cuda" or not way.endswith("-overhead")]
            arguments = {"ways": ways, "model": model}
            needs = f"train-{model}"
            yield Part(f"turns-{model}", device, "in_turns", arguments, "own", (device,), needs, unit="")


PARTS: tuple[Part, ...] = (
    *first_backward("first4", "transformer4", CPU),
    *first_backward("first12", "transformer12", CUDA),
    *first_backward("first48", "transformer48", CUDA),
    *first_step("firststep4", "transformer4", CPU),
    *first_step("firststep12", "transformer12", CUDA),
    *first_step("firststep48", "transformer48", CUDA),
    start("start12", "transformer12"),
    start("start48", "transformer48"),
    *steady_rows(),
    *overhead_rows(),
    *sweep_rows(),
    *real_rows(),
    *training_rows(),
)


def chosen(device: str, patterns: Iterable[str]) -> list[Part]:
    """The parts for a device whose row or id one of the patterns (of `fnmatch`) matches.

    Raises: KeyError for a pattern that matches no part.
    """
    found = []
    for pattern in patterns:
        matching = [part for part in PARTS if fnmatch(part.row, pattern) or fnmatch(part.id, pattern)]
        if not matching:
            raise KeyError(f"no row {pattern!r}; --list shows all")
        found += matching
    return [part for part in PARTS if part in found and device in part.devices]
