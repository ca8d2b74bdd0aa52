"""The zoo of speed as tables: what each way of training takes, and how ours compares with stock.

In: a `figures.Table` with parts "train-MODEL:WAY" and "turns-MODEL:DEVICE". Out: Markdown, which
`python -m benchmarks.render FILE` shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from .figures import Table
from .markdown import markdown
from .trained_models import TRAINED
from .training import WAYS

OURS = ("retrograd-compile", "retrograd-reduce-overhead", "retrograd-live", "retrograd-step")
STOCK = ("stock", "stock-reduce-overhead")
#: with a backward in eager's arithmetic, outside autocast.
LIKE_EAGER = ("stock-like-eager", "stock-like-eager-reduce-overhead")
WHOLE_STEP = ("retrograd-step-reduce-overhead",)
#: figures that are shown for each way: name, what it is divided by, its unit.
SHOWN = (
    ("warm step", 1e-3, "steady step, ms"),
    ("cold start", 1.0, "first three steps, caches empty, s"),
    ("warm start", 1.0, "first three steps, caches full, s"),
    ("warm allocated", 2.0**30, "peak memory allocated, GiB"),
    ("warm reserved", 2.0**30, "peak memory reserved, GiB"),
    ("warm kernels", 1e-3, "work on the device in a steady step, ms"),
)


@dataclass(frozen=True)
class Comparison:
    """A figure of the best of some ways over the best of others, for every model that has both.

    Attributes:
        title: what it is of.
        figure: its name.
        over, under: ways; the smallest figure of each group counts. All ways of a group must have been
            measured.
        mean, worst: what the geometric mean and the largest ratio must not exceed; None: only shown.
        devices: where it is asked for.
    """

    title: str
    figure: str
    over: tuple[str, ...]
    under: tuple[str, ...]
    mean: float | None = None
    worst: float | None = None
    devices: tuple[str, ...] = ("cuda",)


BOTH = ("cpu", "cuda")
COMPARISONS = (
    Comparison("steady step, best of ours / best of stock", "warm step", OURS, STOCK, 0.95, 1.02),
    Comparison("steady step, compile / stock compile", "warm step", OURS[:1], STOCK[:1], None, 1.02, BOTH),
    Comparison(
        "steady step, compile, code of the whole / stock compile",
        "warm step",
        ("retrograd-compile-whole",),
        STOCK[:1],
        None,
        1.02,
        BOTH,
    ),
    *(
        Comparison(f"steady step, {ours} / {theirs}", "warm step", over, under, mean, worst)
        for theirs, under in {
            "reduce-overhead": STOCK[1:],
            "reduce-overhead like eager": LIKE_EAGER[1:],
        }.items()
        for ours, over, mean, worst in (
            ("CUDA graphs", OURS[1:2], None, 1.05),
            ("compile_step with CUDA graphs", WHOLE_STEP, 0.95, 1.02),
        )
    ),
    Comparison(
        "steady step, compile / stock compile like eager", "warm step", OURS[:1], LIKE_EAGER[:1], None, 1.02
    ),
    Comparison(
        "steady step, compile_step / best of the others",
        "warm step",
        OURS[3:],
        (*OURS[:3], *STOCK),
        None,
        1.02,
    ),
    Comparison("steady step, live / eager", "warm step", OURS[2:3], ("eager",), None, 1.0),
    Comparison("steady step, live / eager", "warm step", OURS[2:3], ("eager",), None, 1.05, ("cpu",)),
    Comparison("cold start, compile / stock compile", "cold start", OURS[:1], STOCK[:1], 0.6, 0.9, BOTH),
    Comparison("warm start, compile / stock compile", "warm start", OURS[:1], STOCK[:1], None, 1.0, BOTH),
    Comparison("reserved memory, compile / stock compile", "warm reserved", OURS[:1], STOCK[:1], None, 1.02),
    Comparison("reserved memory, with CUDA graphs", "warm reserved", OURS[1:2], STOCK[1:], None, 1.10),
    *(
        Comparison(f"reserved memory, {ours}, like eager", "warm reserved", over, under, None, worst)
        for ours, over, under, worst in (
            ("compile / stock compile", OURS[:1], LIKE_EAGER[:1], 1.02),
            ("with CUDA graphs", OURS[1:2], LIKE_EAGER[1:], 1.10),
            ("compile_step with CUDA graphs", WHOLE_STEP, LIKE_EAGER[1:], 1.10),
        )
    ),
)


def ratios(table: Table, comparison: Comparison) -> dict[str, float]:
    """The ratio of each model that has all figures."""
    found = {}
    for model in TRAINED:
        over, under = (
            [figure_of(table, model, way, comparison.figure) for way in ways]
            for ways in (comparison.over, comparison.under)
        )
        if None not in over and None not in under:
            found[model] = min(over) / min(under)  # type: ignore[type-var, operator]
    return found


def render(table: Table) -> Iterable[str]:
    """The blocks of text; none if no model was trained."""
    rows = {part.partition(":")[0] for part in table.parts}
    kinds = ("train", "turns", "together")
    models = [model for model in TRAINED if rows & {f"{kind}-{model}" for kind in kinds}]
    if not models:
        return
    ways = [way for way in WAYS if any(figure_of(table, model, way, "warm step") for model in models)]
    for figure, scale, title in SHOWN:
        rows = [(model, *(_shown(table, model, way, figure, scale) for way in ways)) for model in models]
        if any(text for row in rows for text in row[1:]):
            yield markdown((title, *ways), rows)
    if shares := list(_of_stock(table, models, ways)):
        yield markdown(("steady step of stock's, median (quarters) of rounds", *ways), shares)
    yield goals(table)
    if any(_fell_back(table, model, way) for model in models for way in WAYS):
        yield "\\* Some of it ran as eager runs it; `retrograd.explain()` says why."


def _of_stock(table: Table, models: Iterable[str], ways: Sequence[str]) -> Iterable[tuple[str, ...]]:
    for model in models:
        cells = []
        for way in ways:
            share, low, high = (figure_of(table, model, way, name) for name in ("of stock", "low", "high"))
            cells.append("" if share is None else f"{share:.2f} ({low:.2f}–{high:.2f})")
        if any(cells):
            yield (model, *cells)


def _compared(table: Table, asked: Iterable[Comparison]) -> Iterable[tuple[str, ...]]:
    for one in asked:
        found = ratios(table, one) if table.machine.device in one.devices else {}
        if found:
            model, worst = max(found.items(), key=lambda item: item[1])
            mean = geometric_mean(found.values())
            yield (
                one.title,
                f"{mean:.2f}",
                _goal(one.mean, mean),
                f"{worst:.2f} ({model})",
                _goal(one.worst, worst),
                str(len(found)),
            )


def _goal(limit: float | None, value: float) -> str:
    if limit is None:
        return ""
    return f"≤ {limit:g}" + ("" if value <= limit else ", **not met**")


def _shown(table: Table, model: str, way: str, figure: str, scale: float) -> str:
    value = figure_of(table, model, way, figure)
    if value is None:
        return ""
    return f"{value / scale:.3g}" + (r"\*" if _fell_back(table, model, way) else "")


def _fell_back(table: Table, model: str, way: str) -> bool:
    return bool(figure_of(table, model, way, "warm fallbacks"))


def figure_of(table: Table, model: str, way: str, figure: str) -> float | None:
    """A figure, of the run in turns if there was one, in one process before several: what is measured in
    turns is steady, hence warm."""
    steady = f"{way} {figure.removeprefix('warm ')}"
    places = (
        f"together-{model}:step/{steady}",
        f"turns-{model}:{table.machine.device}/{steady}",
        f"train-{model}:{way}/{figure}",
    )
    return next((found for place in places if (found := table.figure(place)) is not None), None)


#: rows of the tables of shortest steps.
SHORT = tuple(
    Comparison(title, "warm least", (ours,), (other,), devices=(device,))
    for device, title, ours, other in (
        ("cuda", "`retrograd.compile` / `torch.compile`", OURS[0], LIKE_EAGER[0]),
        ("cuda", "the same after 2,000 calls", "retrograd-compile-whole", LIKE_EAGER[0]),
        ("cuda", "the same, both with CUDA graphs", OURS[1], LIKE_EAGER[1]),
        ("cuda", "`compile_step` / `torch.compile`, both with CUDA graphs", *WHOLE_STEP, LIKE_EAGER[1]),
        ("cpu", "`retrograd.compile` / `torch.compile`", OURS[0], STOCK[0]),
        ("cpu", "`compile_step` / `torch.compile`", OURS[3], STOCK[0]),
        ("cpu", "`compiled_autograd` / eager", OURS[2], "eager"),
    )
)


def _shortest(table: Table) -> dict[str, dict[str, float]]:
    asked = [one for one in SHORT if table.machine.device in one.devices]
    return {one.title: shares for one in asked if (shares := ratios(table, one))}


def short(table: Table) -> str:
    """What the shortest steps take of stock's, for each model, and the geometric mean."""
    found = _shortest(table)
    models = [model for model in TRAINED if any(model in shares for shares in found.values())]
    rows = []
    for title, shares in found.items():
        cells = (f"{shares[model]:.2f}" if model in shares else "" for model in models)
        rows.append((title, *cells, f"{geometric_mean(shares.values()):.2f}"))
    return markdown(("shortest step, of stock's", *models, "mean"), rows)


def spread(table: Table) -> str:
    """The same over all models: how many, the geometric mean, the best and the worst."""
    rows = []
    for title, shares in _shortest(table).items():
        best, worst = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        ends = (f"{shares[one]:.2f} ({one})" for one in (best, worst))
        rows.append((title, str(len(shares)), f"{geometric_mean(shares.values()):.2f}", *ends))
    return markdown(("shortest step", "models", "mean", "best", "worst"), rows)


def goals(table: Table) -> str:
    """What the table says to the goals of `COMPARISONS`."""
    return markdown(("ratio", "mean", "goal", "worst", "goal", "models"), list(_compared(table, COMPARISONS)))


def like_eager(table: Table) -> str:
    """The same of the steps in which stock computes as eager does."""
    asked = [one for one in COMPARISONS if "like eager" in one.title and one.figure == "warm step"]
    return markdown(("ratio", "mean", "goal", "worst", "goal", "models"), list(_compared(table, asked)))


def starts(table: Table) -> str:
    """The first three steps of a process: seconds of stock's and of ours, and their ratio; the last part that
    the table has of a model counts."""
    found: dict[str, dict[str, Sequence[str]]] = {}
    for name, one in table.parts.items():
        if part := re.fullmatch(r"start-(?:noted-)?(\w+):(cold|warm)", name):
            ours, stock = (one.figures[f"{way} step"] for way in (OURS[0], LIKE_EAGER[0]))
            found.setdefault(part[1], {})[part[2]] = (f"{stock:.1f}", f"{ours:.1f}", f"{ours / stock:.2f}")
    rows = [(model, *kinds["cold"], *kinds["warm"]) for model, kinds in found.items()]
    head = [f"{kind}, {who}" for kind in ("cold", "warm") for who in ("stock", "retrograd", "ratio")]
    return markdown(("seconds", *head), rows)
