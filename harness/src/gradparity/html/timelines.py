"""Two hook timelines side by side, as an SVG picture.

In: the timelines of an exhibit. Out: SVG text: eager's calls left, the subject's right, a line from each
call to the same call on the other side. A line that crosses others is a call out of order; a call without a
line is missing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from html import escape
from typing import Any

ROW = 26
HEAD = 30
WIDTH = 1080
BOX = 430
LONGEST = 62
SAME, OTHER, ALONE = "same", "other", "alone"
"""Classes, whose colours the style of the page has."""


def picture(timelines: dict[str, Any], subject: str) -> str:
    """The picture."""
    eager, theirs = timelines["eager"], timelines["subject"]
    differ = set(timelines["differ"])
    links = paired(eager, theirs)
    height = HEAD + ROW * max(len(eager), len(theirs), 1) + 8
    right = WIDTH - BOX
    parts = [
        f'<svg class="timelines" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="hook timelines">',
        _text(4, 18, "eager", "head"),
        _text(right + 4, 18, subject, "head"),
    ]
    for one, two in links:
        css = SAME if one == two and one not in differ else OTHER
        parts.append(
            f'<line x1="{BOX}" y1="{_middle(one)}" x2="{right}" y2="{_middle(two)}" '
            f'class="{css}" stroke-width="2"/>'
        )
    linked = ({one for one, _ in links}, {two for _, two in links})
    for side, (calls, x) in enumerate(((eager, 0), (theirs, right))):
        for place, call in enumerate(calls):
            css = ALONE if place not in linked[side] else (OTHER if place in differ else SAME)
            parts.append(_box(x, place, call, css))
    return "".join(parts) + "</svg>"


def paired(eager: list[str], subject: list[str]) -> list[tuple[int, int]]:
    """For each of eager's calls, the place of the subject's same call (kind and site), the n-th for the
    n-th.
    """
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, call in enumerate(subject):
        waiting[_site(call)].append(place)
    return [
        (place, waiting[_site(call)].popleft()) for place, call in enumerate(eager) if waiting[_site(call)]
    ]


def _site(call: str) -> str:
    """ "tensor first" of "tensor first (float32[4]=…)"."""
    return call.partition(" (")[0]


def _middle(place: int) -> int:
    return HEAD + ROW * place + ROW // 2


def _box(x: int, place: int, call: str, css: str) -> str:
    top = HEAD + ROW * place + 2
    shown = call if len(call) <= LONGEST else call[: LONGEST - 1] + "…"
    return (
        f'<g><title>{escape(call)}</title><rect x="{x}" y="{top}" width="{BOX}" height="{ROW - 5}" rx="4" '
        f'class="{css}" stroke-width="1.5"/>' + _text(x + 8, top + 15, f"{place}  {shown}", "call") + "</g>"
    )


def _text(x: int, y: int, text: str, css: str) -> str:
    return f'<text x="{x}" y="{y}" class="{css}">{escape(text)}</text>'
