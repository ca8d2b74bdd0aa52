"""Draws the pictures of the documents: run as a program, it writes an SVG for each entry of `pictures.toml`.

In: boxes at places of a grid, and arrows between them. Out: SVG text that follows the reader's light or dark
setting, and has a background of its own, so that it can be read on any page.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: in pixels: a place of the grid, a letter, a line, and the space around text.
COLUMN, ROW, LETTER, LINE, PAD = 204, 78, 7.3, 16, 10
STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #1f2328 }
  .page { fill: #ffffff } rect { stroke: #57606a; fill: #f3f4f6; rx: 5 }
  .code { fill: #dbeafe } .python { fill: #fdf0c4 } .leaf { fill: #d9f2dd }
  line, path { stroke: #57606a; fill: none } marker path { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #1e2129 } rect { stroke: #9aa4b2; fill: #2d333b }
    .code { fill: #1c3a63 } .python { fill: #57460e } .leaf { fill: #1d4a2b }
    line, path { stroke: #9aa4b2 } marker path { fill: #9aa4b2 }
  }
"""

Box = tuple[float, float, float, float]


def placed(box: dict[str, Any]) -> Box:
    """The centre of a box, and half its width and height."""
    lines = box["text"].split("\n")
    column, row = box["at"]
    wide = max(map(len, lines)) * LETTER / 2 + PAD
    return (column + 0.5) * COLUMN, (row + 0.5) * ROW, wide, len(lines) * LINE / 2 + PAD / 2


def edge(start: Box, end: Box) -> tuple[float, float]:
    """Where the line from the centre of `start` to that of `end` leaves `start`."""
    across, down = end[0] - start[0], end[1] - start[1]
    share = min(
        start[2] / abs(across) if across else float("inf"), start[3] / abs(down) if down else float("inf")
    )
    return start[0] + across * share, start[1] + down * share


def written(lines: list[str], x: float, y: float) -> list[str]:
    """Centred lines of text around a point."""
    top = y - (len(lines) - 1) * LINE / 2 + 4
    return [
        f'<text x="{x:.0f}" y="{top + i * LINE:.0f}">{escape(line)}</text>' for i, line in enumerate(lines)
    ]


def drawn(picture: dict[str, Any]) -> str:
    """One picture as SVG."""
    places = {name: placed(box) for name, box in picture["box"].items()}
    width = max(x + wide for x, _, wide, _ in places.values()) + PAD
    height = max(y + high for _, y, _, high in places.values()) + PAD
    parts = [f'<rect class="page" width="{width:.0f}" height="{height:.0f}" stroke-width="0"/>']
    for first, second in picture["arrows"]:
        x1, y1 = edge(places[first], places[second])
        x2, y2 = edge(places[second], places[first])
        parts.append(
            f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" marker-end="url(#end)"/>'
        )
    for name, box in picture["box"].items():
        x, y, wide, high = places[name]
        parts.append(
            f'<rect class="{box.get("kind", "value")}" x="{x - wide:.0f}" y="{y - high:.0f}" '
            f'width="{2 * wide:.0f}" height="{2 * high:.0f}"/>'
        )
        parts += written(box["text"].split("\n"), x, y)
    body = "\n".join(parts)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(picture["title"])}</title>
<style>{STYLE}</style>
<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z"/></marker></defs>
{body}
</svg>
"""


def pictures() -> dict[Path, str]:
    """The file of each picture, and what it contains."""
    entries = tomllib.loads((HERE / "pictures.toml").read_text())
    return {HERE / "explanations" / f"{name}.svg": drawn(picture) for name, picture in entries.items()}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
