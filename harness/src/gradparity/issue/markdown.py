"""The draft, in the order of PyTorch's own form for bugs of torch.compile.

In: a `Find` (row, documentation of the program, script, sweep, versions). Out: Markdown with the parts
"Describe the bug", which begins with the program, "Error logs" and "Versions", and at the end an empty part
that a human must write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradparity.issue.documentation import page
from gradparity.verdict import Row

MOST_LINES = 150
"""So long may a file of a backend be that a draft holds its text."""
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
    """All that a draft is made of. `script`: what the draft shows; `attached`: the file that runs it, if it
    does not run by itself; `sweep`: what it says under each version of torch; `versions`: those that matter;
    `backend`: name and text of the file that defines the backend, which must lie beside the script, and the
    names of files that it imports.
    """

    row: Row
    doc: str
    script: str
    environment: str
    issue: str | None = None
    sweep: dict[str, str] = field(default_factory=dict)
    attached: str = ""
    versions: tuple[str, ...] = ()
    backend: tuple[str, ...] | None = None


def markdown(find: Find) -> str:
    """The draft as text."""
    parts = [
        f"# {title(find.row)}",
        f"## 🐛 Describe the bug\n\n{_program(find)}\n\n{_seen(find)}",
        _backend(find),
        _ablation(find.row),
        _sweep(find),
        _reference(find.row),
        _timelines(find.row),
        f"### Documented semantics\n\n{page(find.row).describe()}",
        f"## Error logs\n\n{_logs(find.row)}",
        f"## Versions\n\n```\n{find.environment.strip()}\n```",
        f"## From the person who files this\n\n{HUMAN}",
        f"---\n{DISCLOSED}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _program(find: Find) -> str:
    how = f"`p` makes inputs and records; the attached {find.attached} has both." if find.attached else ""
    how = how or "It prints what eager shows and what the compiler does, and exits with 1 while they differ."
    return f"```python\n{find.script.strip()}\n```\n\n{how}"


def _backend(find: Find) -> str:
    """The text of the user's own file; of a long one, a line that says what it is."""
    if find.backend is None:
        return ""
    name, text, *beside = find.backend
    lines = len(text.splitlines())
    more = f" It imports {', '.join(f'`{other}`' for other in beside)}: attach that, too." if beside else ""
    if lines > MOST_LINES:
        return f"### The backend\n\n`{name}` defines it. It has {lines} lines: attach it.{more}"
    told = f"`{name}` defines it.{more} Put it beside the script:"
    return f"### The backend\n\n{told}\n\n```python\n{text.strip()}\n```"


def title(row: Row) -> str:
    """One line, as an issue would be called."""
    where = f" at {row.operator}" if row.operator else ""
    stage = f" [{row.stage}]" if row.stage not in row.subject else ""
    return f"{row.subject}{stage}: {row.symptom}{where} differs from eager"


def _seen(find: Find) -> str:
    row = find.row
    lines = [f"**Seen** under `{row.subject}`: {' '.join(row.reason.split())}"]
    expected = row.exhibit.get("expected")
    if expected:
        lines.append(f"**Expected**: as in eager, {expected}.")
    if find.doc:
        lines.append(f"**{'The program' if expected else 'Expected'}**: {find.doc}")
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
    found = row.exhibit["ablation"].get("stage")
    told = f"First broken by: **{found}**" if found else "No stage differed when it ran again, alone."
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


def _sweep(find: Find) -> str:
    lines = ["| torch | the script says |", "|---|---|"]
    lines += [f"| {name} | {said} |" for name, said in find.sweep.items()]
    rest = [name for name in find.versions if not any(tried.startswith(name) for tried in find.sweep)]
    told = f"Not tried: {', '.join(rest)}." if rest else ""
    return "### Versions of torch\n\n" + "\n".join([*(lines if find.sweep else ()), "", told]).strip()


def _reference(row: Row) -> str:
    """Errors against a run of eager in float64, of what differs."""
    leaves = [leaf for leaf in row.exhibit.get("errors", []) if leaf["judged"] != "AGREE"]
    if not leaves:
        return ""
    lines = [
        "| value | dtype | eager − compiled | eager − float64 | compiled − float64 | allowed |",
        "|---|---|---|---|---|---|",
    ]
    for leaf in leaves:
        numbers = (_number(leaf[name]) for name in ("off", "eager", "subject", "allowed"))
        lines.append(f"| {leaf['what']} | {leaf['dtype']} | {' | '.join(numbers)} |")
    return "### Against float64\n\nThe largest absolute errors.\n\n" + "\n".join(lines)


def _logs(row: Row) -> str:
    raised: dict[str, str] = row.exhibit.get("raised", {})
    texts = [f"{who}: {text}" for who, text in raised.items()]
    return "```\n" + "\n".join(texts or [row.reason]) + "\n```"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3g}"
