"""badge: what a README shows of a conformance run.

In: a `Conformance`. Out: SVG, which needs no font and no network.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from gradparity.conform.levels import LEVELS
from gradparity.conform.outcome import FAILED, PASSED, Conformance

COLOURS = ("#c0392b", "#d68910", "#b7950b", "#7d9b2e", "#4c9a2a", "#2e8540")
"""By level reached, none first."""
GREY = "#7f7f7f"
LETTER, EDGE = 6.6, 10
"""About how wide a letter is, and the space beside a text."""
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {text}">
<title>{label}: {text}</title>
<rect width="{width}" height="20" rx="3" fill="#555"/>
<rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{middle}" y="14" textLength="{long}">{label}</text>
<text x="{other}" y="14" textLength="{longer}">{text}</text>
</g>
</svg>
"""


def badge(found: Conformance) -> str:
    """The highest level reached; if there is none, how many cases of the first level pass; of a run that did
    not have time for all cases, how many ran and fail.
    """
    count = found.count(0)
    text = f"level {found.reached} of {len(LEVELS) - 1}"
    if found.reached < 0:
        text = f"{count[PASSED]} of {count[PASSED] + count[FAILED]} at level 0"
    colour = COLOURS[found.reached + 1]
    if not found.is_complete:
        failed = len({item.case for item in found.results if item.result == FAILED})
        text, colour = f"incomplete: {found.cases} of {found.planned} cases, {failed} failed", GREY
    label = f"gradparity, torch {found.versions['torch'].partition('+')[0]}"
    long, longer = round(LETTER * len(label)), round(LETTER * len(text))
    left, right = long + 2 * EDGE, longer + 2 * EDGE
    return SVG.format(
        label=escape(label),
        text=escape(text),
        long=long,
        longer=longer,
        left=left,
        right=right,
        width=left + right,
        middle=left / 2,
        other=left + right / 2,
        colour=colour,
    )
