"""What the pages of `docs/ecosystem` show of an example: its code, and what `gains` measured.

In: the name of an example, and the files `gains_*.json` beside this one. Out: Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown

FOLDER = Path(__file__).parent
NAMES = {
    "eager": "eager",
    "stock": "`torch.compile`",
    "live": "`retrograd.compiled_autograd`",
    "compile": "`retrograd.compile`",
}
HEAD = ("way", "first three steps, s", "step, ms", "of eager", "of stock", "peak memory, MiB")


def code(example: str) -> str:
    """The example's file. The test of documents does not run it: its library is in no shared environment."""
    source = (FOLDER / f"{example}.py").read_text()
    return f"<!-- not run: `nox -s ecosystem` runs it -->\n```python\n{source}```"


def gains(example: str) -> str:
    """The figures of an example, one table for each machine that measured it."""
    return "\n\n".join(_tables(example)) or "Not measured yet."


def _tables(example: str) -> Iterator[str]:
    for path in sorted(FOLDER.glob("gains_*.json")):
        found = json.loads(path.read_text())
        if ways := found["examples"].get(example):
            machine = found["machine"]
            yield f"{machine['device']}, torch {machine['torch']}, {machine['date']}:"
            yield markdown(HEAD, [_row(way, ways[way]) for way in NAMES if way in ways])


def _row(way: str, figures: dict[str, Any]) -> tuple[str, ...]:
    if "missing" in figures:
        return (NAMES[way], f"did not run: {figures['missing']}", "", "", "", "")
    memory = f"{figures['allocated'] / 2**20:,.0f}" if "allocated" in figures else "not measured"
    ratios = (f"{figures[name]:.2f}" if name in figures else "" for name in ("of eager", "of stock"))
    return (NAMES[way], f"{figures['start']:.1f}", f"{figures['step'] * 1e3:.1f}", *ratios, memory)
