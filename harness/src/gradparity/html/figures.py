"""The charts of the report, as plotly figures.

In: rows. Out: figures, or None where there is nothing to show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gradparity.report import column
from gradparity.store.store import Run
from gradparity.verdict import Row, Verdict

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = {
    "AGREE": "#2e8540",
    "DIVERGE": "#c0392b",
    "HOOK_ORDER": "#8e44ad",
    "CRASH": "#7b241c",
    "TIMEOUT": "#d68910",
    "MEMORY": "#16a085",
    "SLOW": "#7f8c00",
    "UNSUPPORTED": "#2980b9",
    "NONDETERMINISTIC": "#95a5a6",
    "REF_UNSTABLE": "#bdc3c7",
    "set aside": "#d5d8dc",
}
SLOWEST = 20
MOST_OPERATORS = 25
LEAST = 1e-20
"""Errors of zero are drawn here, so that a logarithmic axis has them."""


def graph_objects() -> Any:
    """plotly, imported when the first chart is drawn: it takes a second."""
    import plotly.graph_objects

    return plotly.graph_objects


def matrix(rows: list[Row]) -> go.Figure | None:
    """Subject × corpus: stacked bars, one colour a verdict, with counts."""
    counts = Counter((row.subject, row.corpus, column(row)) for row in rows)
    places = sorted({(subject, corpus) for subject, corpus, _ in counts})
    verdicts = [name for name in COLOURS if any(key[2] == name for key in counts)]
    if not places:
        return None
    figure = graph_objects().Figure()
    for name in verdicts:
        amounts = [counts[(*place, name)] for place in places]
        totals = [sum(counts[(*place, item)] for item in verdicts) for place in places]
        figure.add_bar(
            y=[f"{subject} · {corpus}" for subject, corpus in places],
            x=[amount / total for amount, total in zip(amounts, totals, strict=True)],
            text=[str(amount) if amount else "" for amount in amounts],
            name=name,
            orientation="h",
            marker_color=COLOURS[name],
        )
    figure.update_layout(barmode="stack", height=120 + 30 * len(places), xaxis_tickformat=".0%")
    return figure


def errors_by_dtype(rows: list[Row]) -> go.Figure | None:
    """The distribution of errors against float64, eager's and the subjects', by dtype."""
    return _boxes(rows, lambda row, leaf: str(leaf["dtype"]), most=12)


def errors_by_operator(rows: list[Row]) -> go.Figure | None:
    """The same by operator (the name of the case), of those with the largest errors."""
    return _boxes(rows, lambda row, leaf: operator(row), most=MOST_OPERATORS)


def operator(row: Row) -> str:
    """What a row is filed under: the operator that an ablation named, else the middle of its address."""
    if row.operator:
        return row.operator
    parts = row.case.split("::")
    return parts[1] if len(parts) > 1 else row.case


def compiles(rows: list[Row]) -> go.Figure | None:
    """How many graphs a case took, by subject."""
    return _histogram(rows, lambda row: row.compiles, "graphs compiled in one case")


def slowest(rows: list[Row]) -> go.Figure | None:
    """The cases that took longest."""
    chosen = sorted((row for row in rows if row.seconds), key=lambda row: -row.seconds)[:SLOWEST]
    if not chosen:
        return None
    figure = graph_objects().Figure(
        graph_objects().Bar(
            y=[f"{row.case} · {row.subject}" for row in reversed(chosen)],
            x=[row.seconds for row in reversed(chosen)],
            orientation="h",
            marker_color="#5d6d7e",
        )
    )
    return figure.update_layout(height=120 + 22 * len(chosen), xaxis_title="seconds")


def trend(history: list[tuple[Run, list[Row]]]) -> go.Figure | None:
    """The share of cases that agree, and the number of distinct divergences, over the runs of a store."""
    if len(history) < 2:
        return None
    figure = graph_objects().Figure()
    for subject in sorted({row.subject for _, rows in history for row in rows}):
        mine = [(run, [row for row in rows if row.subject == subject]) for run, rows in history]
        mine = [(run, rows) for run, rows in mine if rows]
        agreeing = [sum(row.verdict is Verdict.AGREE for row in rows) / len(rows) for _, rows in mine]
        told = [_told(run, rows) for run, rows in mine]
        times = [datetime.fromtimestamp(run.started, UTC).isoformat() for run, _ in mine]
        figure.add_scatter(x=times, y=agreeing, text=told, name=subject, mode="lines+markers")
    return figure.update_layout(yaxis_tickformat=".1%", yaxis_title="AGREE", height=380)


def _told(run: Run, rows: list[Row]) -> str:
    return f"{len(distinct(rows))} distinct divergences, torch {run.versions.get('torch', '?')}"


def distinct(rows: Iterable[Row]) -> list[list[Row]]:
    """The divergences of each signature under each subject."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.is_find:
            found.setdefault((row.subject, row.signature or row.symptom), []).append(row)
    return list(found.values())


def _boxes(rows: list[Row], name_of: Callable[[Row, dict[str, Any]], str], most: int) -> go.Figure | None:
    leaves = [
        (name_of(row, leaf), row.subject, leaf)
        for row in rows
        for leaf in row.exhibit.get("errors", ())
        if leaf.get("subject") is not None and leaf.get("eager") is not None
    ]
    worst: dict[str, float] = {}
    for name, _, leaf in leaves:
        worst[name] = max(worst.get(name, 0.0), _share(leaf, "subject"))
    names = sorted(worst, key=lambda name: -worst[name])[:most]
    if not names:
        return None
    figure = graph_objects().Figure()
    for who in ("eager", *sorted({subject for _, subject, _ in leaves})):
        mine = [item for item in leaves if item[0] in names and who in ("eager", item[1])]
        figure.add_box(
            x=[name for name, _, _ in mine],
            y=[_share(leaf, "eager" if who == "eager" else "subject") for _, _, leaf in mine],
            name=who,
            boxpoints="outliers",
        )
    figure.update_xaxes(categoryorder="array", categoryarray=names)
    return figure.update_layout(
        boxmode="group", yaxis_type="log", yaxis_title="error / magnitude, against float64", height=420
    )


def _share(leaf: dict[str, Any], who: str) -> float:
    error = float(leaf[who]) / (float(leaf["size"]) or 1.0)
    return max(error, LEAST) if math.isfinite(error) else 1.0


def _histogram(rows: list[Row], value: Callable[[Row], int], title: str) -> go.Figure | None:
    if not any(value(row) for row in rows):
        return None
    figure = graph_objects().Figure()
    for subject in sorted({row.subject for row in rows}):
        figure.add_histogram(x=[value(row) for row in rows if row.subject == subject], name=subject)
    return figure.update_layout(barmode="group", xaxis_title=title, yaxis_title="cases", height=340)
