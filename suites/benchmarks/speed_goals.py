"""What the rows of `speed_rows` must show, as ratios; those without a limit are shown beside them.

In: nothing. Out: `GOALS`. A goal names figures as "ROW:NAME/FIGURE".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .speed_rows import AHEAD, BOTH, CPU, CUDA, LIVE, REAL, STOCK, STOCK_AHEAD, SWEEP

#: for whatever is steady: live against eager, compiled against stock's Inductor.
STEADY_LIMIT = 1.05
PEAK_LIMIT = 1.02
#: of what is still allocated after 1,000 more steps; the C library's allocator keeps a little for itself.
GROWTH_LIMIT = 1.001
#: of a backward of a structure that is met once.
NEW_LIMIT = 1.10
#: the engine keeps a hundred bytes of each structure for ever, and its keys share an arena with us.
GROWN_LIMIT = 1.02


@dataclass(frozen=True)
class Goal:
    """A ratio of two figures.

    Attributes:
        title: what it is of.
        over, under: the figures.
        at_most: what it must not exceed; None: it is only shown.
        devices: where it is measured.
        yardstick: a figure that both parts have: each figure is divided by that of its own process first.
    """

    title: str
    over: str
    under: str
    at_most: float | None = None
    devices: tuple[str, ...] = BOTH
    yardstick: str = ""


def first_backward(
    row: str, what: str, limits: tuple[float | None, float | None], devices: tuple[str, ...]
) -> Iterable[Goal]:
    """Ours against stock's two ways, and against ours without regions."""
    ours = f"{row}:retrograd/{LIVE}"
    for (name, subject), limit in zip(STOCK.items(), limits, strict=True):
        title = f"first backward, {what}, against stock {name}"
        yield Goal(title, ours, f"{row}:stock-{name}/{subject}", limit, devices)
    whole = f"{row}:retrograd-whole/{LIVE}-whole"
    yield Goal(f"first backward, {what}, against no regions", ours, whole, None, devices)


def first_step(row: str, what: str, limit: float | None, devices: tuple[str, ...]) -> Goal:
    """Ours as a backend of `torch.compile` against Inductor."""
    title = f"first step, {what}, torch.compile, against stock Inductor"
    return Goal(title, f"{row}:retrograd/{AHEAD}", f"{row}:stock/{STOCK_AHEAD}", limit, devices)


def compile_time() -> Iterable[Goal]:
    """The first backward, the first step, and the start with filled caches."""
    yield from first_backward("first4", "4 layers, d=64", (1 / 5, None), CPU)
    yield from first_backward("first12", "12 layers", (1 / 30, 1 / 4), CUDA)
    yield from first_backward("first48", "48 layers", (None, 1 / 12), CUDA)
    ours = [f"first{layers}:retrograd/{LIVE}" for layers in (48, 12)]
    yield Goal("first backward, 48 layers / 12 layers, ours", ours[0], ours[1], 1.5, CUDA)
    yield first_step("firststep4", "4 layers, d=64", None, CPU)
    yield first_step("firststep12", "12 layers", 0.6, CUDA)
    yield first_step("firststep48", "48 layers", 0.25, CUDA)
    for layers in (12, 48):
        for when, at_most in {"cold": 0.6, "warm": 1.0}.items():
            title = f"{when} first step, {layers} layers, torch.compile, against stock Inductor"
            ours, stocks = (f"start{layers}:compiled/{name} {when}" for name in (AHEAD, STOCK_AHEAD))
            yield Goal(title, ours, stocks, at_most)
    title = "cold first step, 48 layers / 12 layers, torch.compile, ours"
    yield Goal(title, f"start48:compiled/{AHEAD} cold", f"start12:compiled/{AHEAD} cold", 1.3)
    yield Goal(
        "first backward, 12 layers, warm / cold", "warm12:retrograd/warm", "warm12:retrograd/cold", 1 / 5
    )
    yield Goal("warm / cold, stock static", "warm12:stock-static/warm", "warm12:stock-static/cold")


def live(row: str, what: str, limit: float) -> Goal:
    """A steady live backward against eager's."""
    title = f"steady backward, {what}, live, against eager"
    return Goal(title, f"{row}:live/{LIVE} backward", f"{row}:live/eager backward", limit)


def compiled(row: str, what: str) -> Goal:
    """A steady step of our backend against Inductor's."""
    title = f"steady step, {what}, torch.compile, against stock Inductor"
    part = f"{row}:compiled"
    return Goal(title, f"{part}/{AHEAD} step", f"{part}/{STOCK_AHEAD} step", STEADY_LIMIT)


def steady() -> Iterable[Goal]:
    """Run time when everything is warm."""
    graphs = f"steady12:live-cudagraphs/{LIVE}-cudagraphs backward"
    kernels = "steady12:kernels/kernels backward"
    yield live("steady12", "12 layers", 1.0)
    yield Goal(
        "steady backward, 12 layers, CUDA graphs, against the sum of kernels", graphs, kernels, 1.1, CUDA
    )
    yield compiled("steady12", "12 layers")
    for name, subject in STOCK.items():
        part = f"steady12:stock-{name}"
        title = f"steady backward, 12 layers, stock {name}, against eager"
        stock = f"{part}/{subject} backward"
        yield Goal(title, stock, f"{part}/eager backward")
        title = f"steady backward, 12 layers, live, against stock {name}"
        ours = f"steady12:live/{LIVE} backward"
        yield Goal(title, ours, stock, STEADY_LIMIT, yardstick="eager backward")
    yield from perceptron()


def perceptron() -> Iterable[Goal]:
    """Forty layers that are all host time."""
    yield live("mlp40", "40-layer MLP", STEADY_LIMIT)
    yield compiled("mlp40", "40-layer MLP")
    part, subject = "mlp40:live-cudagraphs", f"{LIVE}-cudagraphs"
    graphs, kernels = f"{part}/{subject} backward", "mlp40:kernels/kernels backward"
    what = "40-layer MLP, live CUDA graphs"
    yield Goal(f"steady backward, {what}, against eager", graphs, f"{part}/eager backward", 1 / 3, CUDA)
    yield Goal(
        f"steady step, {what}, against eager", f"{part}/{subject} step", f"{part}/eager step", None, CUDA
    )
    yield Goal(f"steady backward, {what}, against the sum of kernels", graphs, kernels, None, CUDA)
    stock = f"mlp40:stock-reduce-overhead/{STOCK_AHEAD}-cudagraphs"
    ahead = f"mlp40:retrograd-reduce-overhead/{AHEAD}-cudagraphs"
    against = "against stock's reduce-overhead"
    for title, ours, kind, limit in (
        (f"steady backward, {what}, {against}", f"{part}/{subject}", "backward", 0.7),
        (f"steady backward, 40-layer MLP, ours, {against}", ahead, "backward", 0.7),
        (f"steady step, 40-layer MLP, ours, {against}", ahead, "step", STEADY_LIMIT),
    ):
        yield Goal(title, f"{ours} {kind}", f"{stock} {kind}", limit, CUDA, yardstick=f"eager {kind}")


def overhead() -> Iterable[Goal]:
    """Host time, memory and growth."""
    for row, what in {"host-chain": "chain of 300", "host12": "12 layers, d=64"}.items():
        for stock, limit in {"stock": 1 / 3, "stock-static": None}.items():
            title = f"host time per node call, {what}, against {stock}"
            ours, against = f"{row}:retrograd/retrograd", f"{row}:{stock}/{stock}"
            yield Goal(title, ours, against, limit, yardstick="eager")
    for row, what in {"memory-wide": "4 layers, wide", "memory12": "12 layers"}.items():
        for subject, limit in {
            "retrograd-eager": PEAK_LIMIT,
            LIVE: PEAK_LIMIT,
            STOCK["static"]: None,
        }.items():
            for counter, devices in {"allocator": CPU, "cuda": CUDA}.items():
                title = f"peak of a backward, {what}, {subject}, against eager"
                yield Goal(title, f"{row}:{subject}/{counter}", f"{row}:eager/{counter}", limit, devices)
    for subject in ("retrograd-eager", LIVE, AHEAD):
        for count in ("bytes", "objects"):
            part = f"growth:{subject}"
            title = f"{count} after 1,000 more steps, {subject}"
            yield Goal(title, f"{part}/{count} after", f"{part}/{count} before", GROWTH_LIMIT)
    title = "a backward that never repeats, after a dozen, against eager"
    yield Goal(title, "new:live/retrograd-eager", "new:live/eager", NEW_LIMIT, CPU)
    for count in ("bytes", "objects", "objects held"):
        title = f"{count} after 2,048 more structures"
        yield Goal(title, f"new:growth/{count} after", f"new:growth/{count} before", GROWN_LIMIT, CPU)


def sweep() -> Iterable[Goal]:
    """No case may be slower."""
    for model in SWEEP:
        yield live(f"sweep-{model}", model, STEADY_LIMIT)
        yield compiled(f"sweep-{model}", model)


def real() -> Iterable[Goal]:
    """Models from libraries: the same measures."""
    for model in REAL:
        yield from first_backward(f"{model}-first", model, (None, None), BOTH)
        yield first_step(f"{model}-firststep", model, None, BOTH)
        yield live(f"{model}-steady", model, STEADY_LIMIT)
        yield compiled(f"{model}-steady", model)


GOALS: tuple[Goal, ...] = (*compile_time(), *steady(), *overhead(), *sweep(), *real())
