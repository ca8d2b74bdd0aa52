"""The draft, in the order of PyTorch's own form for bugs of torch.compile.

In: a `Find` (row, documentation of the program, script, sweep, versions). Out: Markdown with the parts
"Describe the bug", "Error logs" and "Versions", and an empty part that a human must write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradparity.issue.documentation import page
from gradparity.verdict import Row

HUMAN = """<!-- To be written by a person before this is filed. Delete this part's hint lines.
- What were you doing when this mattered?
- Did you search for the same report? Which ones come close?
- Did you run the script below yourself, and read it?
-->
"""
DISCLOSED = (
    "Script and text were made by gradparity, a differential tester. It ran the program in eager and under "
    "the subject with equal seeds (`fallback_random`), and judged both against a float64 run of eager."
)


@dataclass(frozen=True)
class Find:
    """All that a draft is made of. `sweep`: what the script says under each version of torch."""

    row: Row
    doc: str
    script: str
    environment: str
    issue: str | None = None
    sweep: dict[str, str] = field(default_factory=dict)


def markdown(find: Find) -> str:
    """The draft as text."""
    parts = [
        f"# {title(find.row)}",
        f"## From the person who files this\n\n{HUMAN}",
        f"## 🐛 Describe the bug\n\n{_describe(find)}",
        _ablation(find.row),
        _timelines(find.row),
        _sweep(find.sweep),
        f"### Documented semantics\n\n{page(find.row).describe()}",
        f"### Minimal reproducer\n\nSelf-contained; exits with 1 while the two differ; "
        f"`--unittest` is a failing torch `TestCase`.\n\n```python\n{find.script.strip()}\n```",
        f"## Error logs\n\n{_logs(find.row)}",
        f"## Versions\n\n```\n{find.environment.strip()}\n```",
        f"---\n{DISCLOSED}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(row: Row) -> str:
    """One line, as an issue would be called."""
    where = f" at {row.operator}" if row.operator else ""
    stage = f" [{row.stage}]" if row.stage else ""
    return f"{row.subject}{stage}: {row.symptom}{where} differs from eager"


def _describe(find: Find) -> str:
    row = find.row
    lines = [f"Under `{row.subject}`: {' '.join(row.reason.split())}"]
    if find.doc:
        lines.append(f"What eager does: {find.doc}")
    if find.issue:
        lines.append(f"A public thread that may be the same: {find.issue}")
    return "\n\n".join(lines)


def _ablation(row: Row) -> str:
    steps: list[dict[str, Any]] = row.exhibit.get("ablation", {}).get("steps", [])
    if not steps:
        return ""
    lines = [
        "| stage | subject | verdict | symptom |",
        "|---|---|---|---|",
        "| eager | eager | reference | |",
    ]
    lines += [f"| {s['stage']} | `{s['subject']}` | {s['verdict']} | {s['symptom']} |" for s in steps]
    told = f"First broken by: **{row.stage or 'no stage alone'}**"
    if row.operator:
        told += f", at `{row.operator}` (by {row.exhibit['ablation'].get('how', 'bisection')})"
    return "### Ablation\n\n" + "\n".join(lines) + f"\n\n{told}"


def _timelines(row: Row) -> str:
    shown = row.exhibit.get("timelines")
    if not shown:
        return ""
    differ = set(shown["differ"])
    lines = []
    for place in range(max(len(shown["eager"]), len(shown["subject"]))):
        mark = ">>" if place == min(differ, default=-1) else ("! " if place in differ else "  ")
        one, two = (_at(shown[side], place) for side in ("eager", "subject"))
        lines.append(f"{mark} {place:>3}  {one:<62}  {two}")
    head = f"        {'eager':<62}  {row.subject}"
    return "### Hook timelines\n\n```\n" + "\n".join([head, *lines]) + "\n```"


def _at(calls: list[str], place: int) -> str:
    return calls[place][:62] if place < len(calls) else "—"


def _sweep(sweep: dict[str, str]) -> str:
    if not sweep:
        return "### Versions of torch\n\nNot swept. `gradparity sweep` runs the script under other versions."
    lines = [
        "| torch | the script says |",
        "|---|---|",
        *(f"| {name} | {said} |" for name, said in sweep.items()),
    ]
    return "### Versions of torch\n\n" + "\n".join(lines)


def _logs(row: Row) -> str:
    raised: dict[str, str] = row.exhibit.get("raised", {})
    errors = [e for e in row.exhibit.get("errors", []) if e["judged"] != "AGREE"]
    texts = [f"{who}: {text}" for who, text in raised.items()]
    texts += [
        f"{e['what']}: off eager by {e['off']:.3g}, error against float64 {_number(e['subject'])} "
        f"(eager's own {_number(e['eager'])}, allowed {_number(e['allowed'])})"
        for e in errors
    ]
    return "```\n" + "\n".join(texts or [row.reason]) + "\n```"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3g}"
