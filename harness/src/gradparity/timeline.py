"""timeline: what `gradparity show` prints: two hook timelines side by side, and a table of errors.

In: a Comparison. Out: rich tables; the first differing call is marked with ">>" so that plain text shows it
too. `show_unit` runs the case of a `Task` in a worker, and gives its row with these tables.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from rich.table import Table

from gradparity.case import Case
from gradparity.corpus import registry as corpora
from gradparity.differential import Comparison
from gradparity.executors.unit import Emit, Unit
from gradparity.oracles.differences import differs, first_differing_call, payload_differs
from gradparity.oracles.values import LeafError, errors
from gradparity.outcome import HookEvent, Payload, TensorRecord
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict
from gradparity.work import Task, compared, explained, quiet, with_ablation

MARK = ">>"


def show_unit(unit: Unit, emit: Emit) -> bool:
    """Runs one case; see `executors.unit.RunUnit`. The row comes with what the program is about, the tables,
    and what was raised.
    """
    task = Task(**unit.payload)
    case, device = Case.parse(task.case, task.seed), torch.device(task.device)
    subject = resolve(task.subject)
    program = corpora.program(case, device)
    quiet()
    allowed = unit.timeout * (2 if task.ablate or task.checks else 1)
    emit("start", 0, {"case": case.address, "seed": case.seed, "limit": allowed})
    found = compared(program, subject, device, task.checks)
    row = explained(found)
    row = with_ablation(row, program, device) if task.ablate else row
    shown = {"doc": program.doc, "tables": [timelines(found), error_table(found)], "raised": _raised(found)}
    emit("result", 0, row.to_json() | shown)
    return True


def _raised(found: Comparison) -> list[str]:
    sides = [] if found.evidence is None else [found.evidence.eager, found.evidence.subject]
    names = ("eager", found.beside)
    return [
        f"{name} raises {each.raised.type}: {each.raised.message}"
        for name, each in zip(names, sides, strict=False)
        if each.raised is not None
    ]


def timelines(comparison: Comparison) -> Table | None:
    """Eager's calls left, the subject's right; None if neither made any."""
    evidence = comparison.evidence
    if evidence is None or not (evidence.eager.events or evidence.subject.events):
        return None
    made = Table(title=f"hook timelines of {comparison.row.case}", title_justify="left")
    made.add_column("", no_wrap=True)
    made.add_column("#", justify="right")
    made.add_column("eager", overflow="fold")
    made.add_column(comparison.beside, overflow="fold")
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
    beside = "subject" if comparison.beside == comparison.row.subject else comparison.beside
    for name in ("size", "off eager", "eager off f64", f"{beside} off f64", "allowed"):
        made.add_column(name, justify="right")
    made.add_column("judged", overflow="fold")
    measured = {item.label: item for item in errors(evidence)}
    for pair in evidence.pairs:
        if pair.role == "event":
            continue
        if pair.label in measured:
            _add(made, measured[pair.label])
        elif pair.role != "state" or payload_differs(pair.eager, pair.subject, bitwise=True):
            _add_other(made, pair.label, pair.eager, pair.subject, beside)
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


def _add_other(made: Table, label: str, eager: Payload, subject: Payload, beside: str) -> None:
    same = not payload_differs(eager, subject, bitwise=True)
    said = ["" if same else MARK, label.replace("[", "\\["), "", "", "", "", ""]
    verdict = "equal" if same else "different"
    text = f"{verdict}: eager {_brief(eager)}, {beside} {_brief(subject)}".replace("[", "\\[")
    made.add_row(*said, text, style=None if same else "red")


def _brief(payload: Payload) -> str:
    return payload.describe() if isinstance(payload, TensorRecord) else repr(payload)[:60]
