"""timeline: what `gradparity show` prints: two hook timelines side by side, and a table of errors.

In: a Comparison. Out: rich tables; the first differing call is marked with ">>" so that plain text shows it
too.
"""

from __future__ import annotations

from itertools import zip_longest

from rich.table import Table

from gradparity.differential import Comparison
from gradparity.oracles.differences import differs, first_differing_call, payload_differs
from gradparity.oracles.values import LeafError, errors
from gradparity.outcome import HookEvent, Payload, TensorRecord
from gradparity.verdict import Verdict

MARK = ">>"


def timelines(comparison: Comparison) -> Table | None:
    """Eager's calls left, the subject's right; None if neither made any."""
    evidence = comparison.evidence
    if evidence is None or not (evidence.eager.events or evidence.subject.events):
        return None
    made = Table(title=f"hook timelines of {comparison.row.case}", title_justify="left")
    made.add_column("", no_wrap=True)
    made.add_column("#", justify="right")
    made.add_column("eager", overflow="fold")
    made.add_column(comparison.row.subject, overflow="fold")
    first = first_differing_call(evidence)
    pairs = zip_longest(evidence.eager.events, evidence.subject.events)
    for place, (eager, subject) in enumerate(pairs):
        style = "bold red" if place == first else ("red" if differs(eager, subject, evidence) else None)
        sign = MARK if place == first else ("!" if style else "")
        made.add_row(sign, str(place), _said(eager), _said(subject), style=style)
    return made


def error_table(comparison: Comparison) -> Table | None:
    """Every leaf and value: magnitude, difference from eager, errors against float64, verdict; None if
    there is none.
    """
    evidence = comparison.evidence
    if evidence is None or not evidence.pairs:
        return None
    made = Table(title=f"gradients and values of {comparison.row.case}", title_justify="left")
    made.add_column("", no_wrap=True)
    made.add_column("what", overflow="fold")
    for name in ("size", "off eager", "eager off f64", "subject off f64", "allowed"):
        made.add_column(name, justify="right")
    made.add_column("judged", overflow="fold")
    measured = {item.label: item for item in errors(evidence)}
    for pair in evidence.pairs:
        if pair.role == "event":
            continue
        if pair.label in measured:
            _add(made, measured[pair.label])
        elif pair.role != "state" or payload_differs(pair.eager, pair.subject, bitwise=True):
            _add_other(made, pair.label, pair.eager, pair.subject)
    return made


def _said(event: HookEvent | None) -> str:
    return "—" if event is None else event.describe().replace("[", "\\[")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _add(made: Table, item: LeafError) -> None:
    bad = item.verdict is not Verdict.AGREE
    made.add_row(
        MARK if bad else "",
        item.label.replace("[", "\\["),
        _number(item.magnitude),
        _number(item.difference),
        _number(item.eager_error),
        _number(item.subject_error),
        _number(item.allowed),
        f"{item.verdict} ({item.way})",
        style="red" if bad else None,
    )


def _add_other(made: Table, label: str, eager: Payload, subject: Payload) -> None:
    same = not payload_differs(eager, subject, bitwise=True)
    said = ["" if same else MARK, label.replace("[", "\\["), "", "", "", "", ""]
    verdict = "equal" if same else "different"
    text = f"{verdict}: eager {_brief(eager)}, subject {_brief(subject)}".replace("[", "\\[")
    made.add_row(*said, text, style=None if same else "red")


def _brief(payload: Payload) -> str:
    return payload.describe() if isinstance(payload, TensorRecord) else repr(payload)[:60]
