"""The page: charts, divergences with their timelines and errors, everything inlined.

In: rows, the runs of a store for the trend, a path. Out: one HTML file that needs no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradparity.errors import StoreFullError
from gradparity.html import figures
from gradparity.html.timelines import picture
from gradparity.html.wording import STYLE, SUMMARY, TITLE
from gradparity.report import column
from gradparity.store.store import Run
from gradparity.verdict import Row
from gradparity.versions import versions

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_FINDS = 200

CHARTS: tuple[tuple[str, str, Callable[[list[Row]], Any]], ...] = (
    ("matrix", "Verdicts by subject and corpus", figures.matrix),
    ("errors-by-dtype", "Errors by dtype", figures.errors_by_dtype),
    ("errors-by-operator", "Errors by operator", figures.errors_by_operator),
    ("compiles", "Graphs compiled", figures.compiles),
    ("slowest", "Slowest cases", figures.slowest),
)
"""In the order of the page: anchor, heading, figure."""


def write_page(rows: list[Row], path: Path, history: list[tuple[Run, list[Row]]] | None = None) -> None:
    """Writes the page. Raises StoreFullError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(rows, history or []), encoding="utf-8")
    except OSError as error:
        raise StoreFullError(f"cannot write {path}: {error}\n  try    another path") from error


def page(rows: list[Row], history: list[tuple[Run, list[Row]]]) -> str:
    """The page as text."""
    body = [_summary(rows), _finds(rows)]
    body += [_section(anchor, heading, draw(rows)) for anchor, heading, draw in CHARTS]
    body.append(_section("trend", "Trend over stored runs", figures.trend(history)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f"<style>{STYLE}</style><script>{_plotly().offline.get_plotlyjs()}</script></head><body><h1>{TITLE}</h1>"
        f"{''.join(part for part in body if part)}</body></html>"
    )


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
    counted = "".join(
        f'<span class="badge" style="background:{colour}">{counts[name]} {name}</span>'
        for name, colour in figures.COLOURS.items()
        if counts[name]
    )
    return f'<p id="summary">{numbers}</p><p>{counted}</p><p class="versions">{told}</p>'


def _section(anchor: str, heading: str, figure: go.Figure | None) -> str:
    if figure is None:
        return ""
    figure.update_layout(margin={"t": 20, "b": 40, "l": 20, "r": 20}, template="plotly_white")
    figure.update_yaxes(automargin=True)
    drawn = _plotly().io.to_html(
        figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False}
    )
    return f'<section id="{anchor}"><h2>{escape(heading)}</h2>{drawn}</section>'


def _finds(rows: list[Row]) -> str:
    found = list(figures.distinct(rows).values())
    if not found:
        return ""
    counts = dict.fromkeys(figures.distinct(rows), 0)
    for row in rows:
        if row.is_find:
            counts[row.subject, row.signature or row.symptom] += 1
    shown = "".join(
        _find(row, counts[row.subject, row.signature or row.symptom]) for row in found[:MOST_FINDS]
    )
    more = f"<p>… and {len(found) - MOST_FINDS} more</p>" if len(found) > MOST_FINDS else ""
    return f'<section id="finds"><h2>Distinct divergences</h2>{shown}{more}</section>'


def _find(row: Row, count: int) -> str:
    mark = " (expected)" if row.expected else ""
    colour = figures.COLOURS[row.verdict.value]
    head = (
        f'<span class="badge" style="background:{colour}">{row.verdict.value}</span> '
        f"<b>{escape(row.subject)}</b> {escape(row.case)}{mark} <i>{escape(row.symptom)}</i> "
        f"× {count} <code>{escape(row.signature)}</code>"
    )
    shown = row.exhibit
    parts = [f"<p>{escape(row.reason)}</p>", _ablation(row)]
    if "timelines" in shown:
        parts.append(picture(shown["timelines"], row.subject))
    parts += [_raised(shown.get("raised", {})), _errors(shown.get("errors", []))]
    opened = " open" if "timelines" in shown else ""
    return f"<details{opened}><summary>{head}</summary>{''.join(parts)}</details>"


def _ablation(row: Row) -> str:
    steps = row.exhibit.get("ablation", {}).get("steps", [])
    if not steps:
        return ""
    told = " → ".join(f"{escape(step['stage'])} <b>{escape(step['verdict'])}</b>" for step in steps)
    operator = f"; operator {escape(row.operator)}" if row.operator else ""
    return f'<p class="ablation">{told}{operator}</p>'


def _raised(raised: dict[str, str]) -> str:
    return "".join(f"<pre>{escape(who)} raises {escape(text)}</pre>" for who, text in raised.items())


def _errors(leaves: list[dict[str, Any]]) -> str:
    if not leaves:
        return ""
    names = ("what", "dtype", "size", "off", "eager", "subject", "allowed", "judged")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = "".join(
        f'<tr class="{leaf["judged"]}">'
        + "".join(f"<td>{_cell(leaf[name])}</td>" for name in names)
        + "</tr>"
        for leaf in leaves
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))
