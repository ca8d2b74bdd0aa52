"""How often each subject agrees with eager, as tables for README.md and docs/comparison.md.

In: `suites/parity/agreement.toml`. Out: Markdown.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown

DATA = Path(__file__).with_name("agreement.toml")

#: rows of the short table: what a reader calls a subject. All of them compute with eager's own kernels.
NAMES = {
    "stock-ca:eager": "stock compiled autograd",
    "stock-compile:aot_eager": '`torch.compile(backend="aot_eager")`',
    "retrograd-live:eager": "`retrograd.compiled_autograd`",
    "retrograd-compile:eager": '`torch.compile(backend="retrograd")`',
    "retrograd-aot:eager": "`retrograd.aot`",
}


def rows() -> list[dict[str, Any]]:
    """The rows of the file."""
    found: list[dict[str, Any]] = tomllib.loads(DATA.read_text())["row"]
    return found


def differ(row: dict[str, Any]) -> int:
    """How many cases are unlike eager."""
    return int(row["cases"] - row["agree"] - row["aside"])


def short() -> str:
    """What share of the scenarios runs as in eager, for each way in and for stock."""
    found = {row["subject"]: row for row in rows() if row["corpus"] == "scenarios"}
    cells = [
        (name, f"{row['cases']:,}", str(differ(row)), f"{row['agree'] / row['cases']:.1%}")
        for subject, name in NAMES.items()
        for row in (found[subject],)
    ]
    return markdown(("with eager kernels", "programs", "unlike eager", "like eager"), cells)


def whole() -> str:
    """Every row."""
    cells = [
        (
            f"`{row['subject']}`",
            row["corpus"],
            f"{row['cases']:,}",
            *(str(row[name] or "·") for name in ("aside", "fell_back")),
            str(differ(row) or "·"),
            str(row["stocks_own"] or "·"),
            f"{row['where']}, {row['date']:%-d %B}",
        )
        for row in rows()
    ]
    head = (
        "subject",
        "corpus",
        "cases",
        "set aside",
        "fell back",
        "differ",
        "of these stock's own",
        "measured",
    )
    return markdown(head, cells)
