"""The page: distinct divergences, then charts, everything inlined.

In: rows, the runs of a store for the trend, a path. Out: one HTML file that needs no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradparity.html import figures
from gradparity.html.finds import finds
from gradparity.html.wording import SUMMARY, TITLE
from gradparity.report import column
from gradparity.store.store import Run
from gradparity.verdict import Row
from gradparity.versions import versions
from gradparity.writing import write_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

CHARTS: tuple[tuple[str, str, Callable[[list[Row]], Any]], ...] = (
    ("matrix", "Verdicts by subject and corpus", figures.matrix),
    ("errors-by-dtype", "Errors by dtype", figures.errors_by_dtype),
    ("errors-by-operator", "Errors by operator", figures.errors_by_operator),
    ("compiles", "Graphs compiled", figures.compiles),
    ("slowest", "Slowest cases", figures.slowest),
)
"""In the order of the page: anchor, heading, figure."""


def write_page(
    rows: list[Row], path: Path, history: list[tuple[Run, list[Row]]] | None = None, first: str = ""
) -> None:
    """Writes the page. Raises StoreFullError if the file cannot be written."""
    write_text(path, page(rows, history or [], first))


def page(rows: list[Row], history: list[tuple[Run, list[Row]]], first: str = "") -> str:
    """The page as text. `first`: a section, as HTML, to stand before the divergences."""
    body = [_summary(rows), first, finds(rows)]
    body += [_section(anchor, heading, draw(rows)) for anchor, heading, draw in CHARTS]
    body.append(_section("trend", "Trend over stored runs", figures.trend(history)))
    text = "".join(part for part in body if part)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_file('page.css')}</style><script>{_plotly().offline.get_plotlyjs()}</script></head>"
        f'<body><h1>{TITLE} <button id="theme" aria-label="light or dark">◐</button></h1>{text}'
        f"<script>{_file('page.js')}</script></body></html>"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> Any:
    import plotly.io
    import plotly.offline

    return plotly


def _summary(rows: list[Row]) -> str:
    found = figures.distinct(rows)
    told = " · ".join(f"{escape(name)} {escape(value)}" for name, value in versions().items())
    numbers = SUMMARY.format(
        cases=len(rows), divergences=sum(row.is_find for row in rows), distinct=len(found)
    )
    counts = Counter(map(column, rows))
    counted = " ".join(
        f'<span class="badge" style="background:{colour}">{counts[name]} {name}</span>'
        for name, colour in figures.COLOURS.items()
        if counts[name]
    )
    return f'<p id="summary">{numbers}</p><p>{counted}</p><p class="versions">{told}</p>'


def _section(anchor: str, heading: str, figure: go.Figure | None) -> str:
    if figure is None:
        return ""
    figure.update_layout(margin={"t": 50, "b": 40, "l": 20, "r": 20}, template="plotly_white")
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font_color="#808890")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_xaxes(gridcolor="rgba(128,128,128,.3)", zerolinecolor="rgba(128,128,128,.5)")
    figure.update_yaxes(gridcolor="rgba(128,128,128,.3)", automargin=True)
    drawn = _plotly().io.to_html(
        figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False, "responsive": True}
    )
    inner = f'<div class="wide"><div class="chart">{drawn}</div></div>'
    return f'<section id="{anchor}"><h2>{escape(heading)}</h2>{inner}</section>'
