"""The distinct divergences of the page: in order of importance, each with all that a reader needs of it.

In: rows. Out: HTML.
"""

from __future__ import annotations

import shlex
from html import escape
from itertools import accumulate, islice
from typing import Any

from gradparity.html import figures
from gradparity.html.timelines import picture
from gradparity.html.wording import KEYS, SORTS
from gradparity.verdict import Row, Verdict

MOST_FINDS = 200
MOST_MEMBERS = 500
MOST_TEXT = 800_000
"""So many characters of divergences does a page have."""
ORDER = (
    Verdict.DIVERGE,
    Verdict.HOOK_ORDER,
    Verdict.CRASH,
    Verdict.MEMORY,
    Verdict.SLOW,
    Verdict.UNSUPPORTED,
    Verdict.TIMEOUT,
)
"""What is silently wrong comes first."""


def finds(rows: list[Row]) -> str:
    """The section; "" if nothing diverges."""
    found = sorted(figures.distinct(rows), key=lambda group: _importance(group[0], len(group)))
    if not found:
        return ""
    drawn = [_find(group, place) for place, group in enumerate(found[:MOST_FINDS])]
    count = max(sum(size <= MOST_TEXT for size in accumulate(map(len, drawn))), 1)
    shown = "".join(drawn[:count])
    more = f"<p>… and {len(found) - count} more</p>" if len(found) > count else ""
    listed = [group[0] for group in found[:count]]
    head = '<h2>Distinct divergences <span id="count" class="hint"></span></h2>'
    return f'<section id="finds">{head}{_bar(listed)}<div id="list">{shown}</div>{more}</section>'


def _importance(row: Row, count: int) -> tuple[bool, bool, int, int]:
    """Unexpected ones first; of these, what differs in silence before what raises; then the frequent ones."""
    raises = row.symptom.startswith(("raises", "no-exception"))
    return row.expected, raises, ORDER.index(row.verdict), -count


def _bar(rows: list[Row]) -> str:
    verdicts = [verdict.value for verdict in ORDER if any(row.verdict is verdict for row in rows)]
    keys = "".join(f"<tr><td>{escape(key)}</td><td>{escape(does)}</td></tr>" for key, does in KEYS.items())
    return (
        '<div class="bar"><input id="search" type="search" placeholder="search (/)" aria-label="search">'
        + _select("verdict", "all verdicts", verdicts)
        + _select("subject", "all subjects", sorted({row.subject for row in rows}))
        + _select("sort", "", SORTS)
        + '<button id="help" aria-label="keys">?</button></div>'
        f'<dialog id="keys"><table>{keys}</table><form method="dialog"><button>close</button></form></dialog>'
    )


def _select(name: str, every: str, values: Any) -> str:
    first = f'<option value="">{every}</option>' if every else ""
    prefix = "" if every else "by "
    options = "".join(f'<option value="{escape(each)}">{prefix}{escape(each)}</option>' for each in values)
    return f'<select id="{name}" aria-label="{name}">{first}{options}</select>'


def command(row: Row) -> str:
    """What runs the case again."""
    words = ["gradparity", "show", row.case, "-s", row.subject]
    return shlex.join(words + (["--seed", str(row.seed)] if row.seed else []))


def _find(group: list[Row], place: int) -> str:
    """A group of divergences of one kind: the first of them, then a list of all."""
    row = group[0]
    mark = " (expected)" if row.expected else ""
    colour = figures.COLOURS[row.verdict.value]
    stage = f" · {escape(row.where)}" if row.where else ""
    times = f"× {len(group)} " if len(group) > 1 else ""
    head = (
        f'<span class="badge" style="background:{colour}">{row.verdict.value}</span> '
        f"<b>{escape(row.subject)}</b>{stage} {escape(row.case)}{mark} <i>{escape(row.symptom)}</i> "
        f"{times}<code>{escape(row.signature)}</code>"
    )
    data = {
        "verdict": row.verdict.value,
        "subject": row.subject,
        "case": row.case,
        "cases": len(group),
        "seconds": f"{row.seconds:.3f}",
        "place": place,
    }
    words = " ".join(f'data-{key}="{escape(str(value))}"' for key, value in data.items())
    css = "find expected" if row.expected else "find"
    opened = " open" if place == 0 else ""
    inner = f"<summary>{head}</summary><div>{_body(row)}{_members(group)}</div>"
    return f'<details class="{css}" {words}{opened}>{inner}</details>'


def _body(row: Row) -> str:
    shown = row.exhibit
    parts = [f"<p>{escape(row.reason)}</p>", _ablation(row), _copied(command(row))]
    if "program" in shown:
        parts.append(f"<h3>Program</h3><pre>{escape(shown['program'].strip())}</pre>")
    if "timelines" in shown:
        parts.append(f'<h3>Hooks</h3><div class="wide">{picture(shown["timelines"], row.subject)}</div>')
    parts += [_raised(shown.get("raised", {})), _errors(shown.get("errors", []))]
    if "script" in shown:
        parts.append(
            f"<details><summary>Script in plain torch</summary>{_copied(shown['script'].strip())}</details>"
        )
    return "".join(parts)


def _members(group: list[Row]) -> str:
    """Every case of the group, with its stage."""
    if len(group) == 1:
        return ""
    cells = ((row.case, row.where or "no stage is known", f"{row.seconds:.3f} s") for row in group)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in islice(cells, MOST_MEMBERS)
    )
    more = f"<p>… and {len(group) - MOST_MEMBERS} more</p>" if len(group) > MOST_MEMBERS else ""
    return f"<details><summary>All {len(group)} cases</summary><table>{lines}</table>{more}</details>"


def _copied(text: str) -> str:
    """A text with a button that copies it."""
    return f'<div class="copied"><pre>{escape(text)}</pre><button class="copy">copy</button></div>'


def _ablation(row: Row) -> str:
    steps = row.exhibit.get("ablation", {}).get("steps", [])
    if not steps:
        return ""
    told = " → ".join(f"{escape(step['stage'])} <b>{escape(step['verdict'])}</b>" for step in steps)
    operator = f"; operator {escape(row.operator)}" if row.operator else ""
    return f'<p class="ablation">{told}{operator}</p>'


def _raised(raised: dict[str, str]) -> str:
    return "".join(
        f'<pre class="error">{escape(who)} raises {escape(text)}</pre>' for who, text in raised.items()
    )


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
    return f'<h3>Errors</h3><div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))
