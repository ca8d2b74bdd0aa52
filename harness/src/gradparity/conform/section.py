"""section: the levels, for the HTML page of a conformance run.

In: a `Conformance`. Out: HTML.
"""

from __future__ import annotations

from html import escape

from gradparity.conform.levels import LEVELS
from gradparity.conform.outcome import RESULTS, Conformance


def section(found: Conformance) -> str:
    """The table that the terminal shows, and the level that the backend reaches."""
    heads = ("level", "what must be as in eager", *RESULTS)
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = "".join(_line(found, number) for number in range(len(LEVELS)))
    inner = f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'
    return f'<section id="levels"><h2>Levels</h2><p>{escape(found.describe())}</p>{inner}</section>'


def _line(found: Conformance, number: int) -> str:
    count = found.count(number)
    cells = (str(number), LEVELS[number].title, *(str(count[name] or "·") for name in RESULTS))
    css = ' class="DIVERGE"' if count["failed"] else ""
    return f"<tr{css}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
