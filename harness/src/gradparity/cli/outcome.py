"""What is printed and written when a campaign is over.

In: a Campaign. Out: the table, a line for each divergence, fallbacks, errors, a summary; files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from gradparity import campaign, report
from gradparity.cli.options import standard_error
from gradparity.html.page import write_page
from gradparity.junit import write_junit
from gradparity.store.lines import line, write_lines
from gradparity.store.store import Run
from gradparity.verdict import Row


@dataclass(frozen=True)
class Files:
    """Where results are written besides; None: nowhere."""

    json: Path | None = None
    html: Path | None = None
    junit: Path | None = None

    def write(
        self,
        rows: list[Row],
        history: Iterable[tuple[Run, list[Row]]] = (),
        errors: Sequence[str] = (),
    ) -> None:
        """Writes them. Raises StoreFullError if one cannot be written."""
        if self.json is not None:
            write_lines(rows, self.json)
        if self.junit is not None:
            write_junit(rows, self.junit, errors)
        if self.html is not None:
            write_page(rows, self.html, list(history))


def print_campaign(console: Console, plan: campaign.Plan, result: campaign.Campaign) -> None:
    """Everything about a campaign that is over."""
    console.print(
        f"torch {torch.__version__}, device {plan.device}, seed {plan.seed}, {plan.processes} processes"
    )
    print_rows(console, result.rows)
    for text in report.unlisted_lines(result.rows):
        console.print(text, style="red", markup=False, soft_wrap=True)
    wrong = standard_error(console)
    for error in result.errors:
        wrong.print(f"could not run: {error}", style="red", markup=False, soft_wrap=True)
    print_stale(console, result)
    if result.ending.broken:
        wrong.print(f"error: {result.ending.broken}", style="red", markup=False, soft_wrap=True)
    for row in result.ending.unwritten:
        console.print(f"not written: {line(row).strip()}", markup=False, soft_wrap=True)
    console.print(summary(result), markup=False, soft_wrap=True)


def print_stale(console: Console, result: campaign.Campaign) -> None:
    """The entries of the file of known divergences that explain nothing any more."""
    for entry in result.stale:
        told = f"stale entry, nothing is so any more: {entry.describe()}"
        console.print(told, style="red", markup=False, soft_wrap=True)


def print_rows(console: Console, rows: list[Row]) -> None:
    """The table, the divergences, the fallbacks."""
    if rows:
        console.print(report.table(rows))
    for found in report.lines(rows):
        console.print(found, soft_wrap=True)
    for text in report.fallback_lines(rows):
        console.print(text, markup=False, soft_wrap=True)


def summary(result: campaign.Campaign) -> str:
    """The last line."""
    aside = sum(row.set_aside for row in result.rows)
    diverged = sum(row.verdict.is_divergence and not row.set_aside for row in result.rows)
    text = f"{len(result.rows)} cases run, {aside} set aside, {diverged} divergences"
    text += f", of which {len(result.unexpected)} unexpected of an accountable subject"
    if result.unlisted:
        text += f"; {len(result.unlisted)} cases with unlisted fallbacks"
    if own := sum(row.stocks_own for row in result.rows):
        text += f", {own} stock's own"
    if result.stale:
        text += f"; {len(result.stale)} stale expected entries"
    return text + ("; interrupted" if result.ending.interrupted else "")
