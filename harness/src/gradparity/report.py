"""report: rows as a table, as lines, as JSONL.

In: a list of rows. Out: rich renderables and text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from gradparity.verdict import FALLBACK, Row, Verdict

STYLES = {
    Verdict.AGREE: "green",
    Verdict.DIVERGE: "red",
    Verdict.HOOK_ORDER: "magenta",
    Verdict.CRASH: "bold red",
    Verdict.TIMEOUT: "yellow",
    Verdict.MEMORY: "blue",
    Verdict.SLOW: "blue",
    Verdict.UNSUPPORTED: "cyan",
    Verdict.NONDETERMINISTIC: "dim",
    Verdict.REF_UNSTABLE: "dim",
}
SET_ASIDE = "set aside"
FELL_BACK = "fell back"
STOCKS_OWN = "stock's own"


def column(row: Row) -> str:
    """The column of the table in which a row is counted: its verdict, or "set aside" for cases skipped
    with a reason.
    """
    return SET_ASIDE if row.symptom == SET_ASIDE.replace(" ", "-") else row.verdict.value


def table(rows: Iterable[Row]) -> Table:
    """Subject × corpus, with counts per verdict, of cases that fell back, of divergences that are those of a
    stock forward, and of known ones.
    """
    cells: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        counts = cells.setdefault((row.subject, row.corpus), Counter())
        counts.update([column(row), "cases"] + [FELL_BACK] * row.fell_back + ["expected"] * row.expected)
        counts.update([STOCKS_OWN] * row.stocks_own)
    used = {name for counts in cells.values() for name in counts}
    shown = [
        verdict.value
        for verdict in Verdict
        if verdict.value in used or verdict in (Verdict.AGREE, Verdict.DIVERGE)
    ]
    shown += [name for name in (SET_ASIDE, FELL_BACK, STOCKS_OWN, "expected") if name in used]
    made = Table(title="gradparity: subject × corpus", title_justify="left")
    made.add_column("subject", no_wrap=True)
    made.add_column("corpus", no_wrap=True)
    made.add_column("cases", justify="right")
    for name in shown:
        style = STYLES[Verdict(name)] if name in list(Verdict) else "yellow"
        made.add_column(name, justify="right", header_style=style)
    for (subject, corpus), counts in sorted(cells.items()):
        made.add_row(subject, corpus, str(counts["cases"]), *(str(counts[name] or "·") for name in shown))
    return made


def lines(rows: Iterable[Row]) -> list[Text]:
    """One line per divergence, and per case whose reference was unstable, in order of verdict, subject and
    case.
    """
    order = list(Verdict)
    told = [row for row in rows if row.verdict.is_divergence and column(row) != SET_ASIDE]
    told.sort(key=lambda row: (row.expected, row.stocks_own, order.index(row.verdict), row.subject, row.case))
    return [line(row) for row in told]


def line(row: Row) -> Text:
    """One divergence in one line."""
    mark = " (expected)" if row.expected else f" ({STOCKS_OWN})" if row.stocks_own else ""
    text = Text(f"{row.verdict.value:<12}", style=STYLES[row.verdict])
    reason = " ".join(row.reason.split())
    mark += f"  {row.where}" if row.where else ""
    return text.append(f" {row.subject}  {row.case}{mark}  {row.symptom}: {reason}"[:400], style="default")


def fallback_lines(rows: Iterable[Row]) -> list[str]:
    """The reasons for fallbacks, with how many cases each had, most frequent first."""
    counts = Counter((row.subject, note) for row in rows for note in row.notes if FALLBACK.match(note))
    return [f"{count:>6} × {subject}  {note}" for (subject, note), count in counts.most_common()]


def unlisted_lines(rows: Iterable[Row]) -> list[str]:
    """One line per fallback that the file of known ones does not list."""
    return [
        f"unlisted fallback: {row.subject}  {row.case}  {note}"
        for row in rows
        for note in row.notes
        if (match := FALLBACK.match(note)) and (match["code"] or "") in row.unlisted
    ]
