"""The zoo's verdicts as data, and as a page.

In: stores of ``gradparity run --store`` over the corpora `zoo` and `architectures`, or files that were made
of them. Out: the file, `suites/parity/zoo_*.json`, and the page `docs/zoo.md`.

    python suites/parity/zoo.py DEVICE FILE STORE ...   # a file of stores, of which later ones count
    python suites/parity/zoo.py > docs/zoo.md           # the page of all files
"""

from __future__ import annotations

import datetime
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from gradparity.store.store import Store
from gradparity.verdict import Verdict

FOLDER = Path(__file__).parent
FILES = "zoo_*.json"
#: what eager could not train.
UNTRAINED = "UNTRAINED"
ASIDE = [UNTRAINED, *(verdict.value for verdict in Verdict if verdict.is_set_aside)]

HEAD = """# The zoo

Models of other packages, built small from code alone, and trained for three steps with dropout. *Live*: an
eager forward, retrograd's backward. *Compile*: `torch.compile(backend="retrograd")`. *Step*:
`retrograd.compile_step`. The eager lowering must give eager's bits; Inductor must be near float64. The data
stand in `suites/parity`, and `python suites/parity/zoo.py` makes this page.

A model that agrees or is set aside under every subject, and fell back under none, is only counted. *Set
aside*: eager does not repeat its own result, or is too far from float64 to judge by, or raises: a small
model of each architecture is made by rules, not chosen. *Stock's own*: the forward that Dynamo
made shows the same difference with torch's own backward, or stock's Inductor is as far from float64. All
other divergences are listed in `suites/parity/expected.toml`, with their reasons.
"""


def of_stores(stores: list[Path], device: str) -> dict[str, Any]:
    """Verdicts and codes of fallbacks, by case and subject."""
    verdicts: dict[str, dict[str, str]] = {}
    fallbacks: dict[str, dict[str, list[str]]] = {}
    for path in stores:
        with Store(path, create=False) as store:
            rows, first = store.rows(), store.runs()[0]
        for row in rows:
            own = " (stock's own)" if row.stocks_own else ""
            is_untrained = row.set_aside and not row.verdict.is_set_aside
            verdicts.setdefault(row.case, {})[row.subject] = UNTRAINED if is_untrained else row.verdict + own
            codes = sorted(filter(None, row.fallbacks))
            fallbacks.setdefault(row.case, {}).pop(row.subject, None)
            if codes:
                fallbacks[row.case][row.subject] = codes
    date = datetime.datetime.fromtimestamp(first.started, datetime.UTC).date().isoformat()
    return {
        "date": date,
        "device": device,
        "fallbacks": {case: found for case, found in fallbacks.items() if found},
        "torch": first.versions["torch"],
        "verdicts": verdicts,
    }


def page(files: list[dict[str, Any]]) -> str:
    """The page of some files."""
    return "\n".join([HEAD, *(line for one in files for line in _section(one))])


def _section(one: dict[str, Any]) -> list[str]:
    verdicts, fallbacks = one["verdicts"], one.get("fallbacks", {})
    subjects = sorted({subject for found in verdicts.values() for subject in found})
    lines = [f"## torch {one['torch']}, {one['device']}, {one['date']}", ""]
    lines += textwrap.wrap(one.get("note", ""), 110) + [""] * ("note" in one)
    lines += ["| subject | models | agree | set aside | stock's own | diverge | other | fell back |"]
    lines += ["|---" * 8 + "|"]
    for subject in subjects:
        found = [of[subject] for of in verdicts.values() if subject in of]
        fell = sum(subject in codes for codes in fallbacks.values())
        agree, aside = found.count("AGREE"), sum(verdict in ASIDE for verdict in found)
        own, diverge = found.count("DIVERGE (stock's own)"), found.count("DIVERGE")
        counts = (len(found), agree, aside, own, diverge, len(found) - agree - aside - own - diverge, fell)
        lines.append(f"| {subject} | {' | '.join(str(count or '·') for count in counts)} |")
    counted = {"AGREE", *ASIDE}
    told = [case for case, of in verdicts.items() if case in fallbacks or not counted.issuperset(of.values())]
    if told:
        lines += ["", f"| model | {' | '.join(subjects)} |", "|---" * (len(subjects) + 1) + "|"]
    for case in told:
        cells = [_cell(verdicts[case].get(s), fallbacks.get(case, {}).get(s, ())) for s in subjects]
        lines.append(f"| {case.partition('::')[2]} | {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(verdict: str | None, codes: Any) -> str:
    words = {
        None: "–",
        "AGREE": "agrees",
        **dict.fromkeys(ASIDE, "set aside"),
        "DIVERGE (stock's own)": "stock's own",
    }
    text = words.get(verdict) or str(verdict).lower()
    return f"{text}; {', '.join(codes)}" if codes else text


def read() -> list[dict[str, Any]]:
    """All files, the newest torch first."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob(FILES))]
    return sorted(found, key=lambda one: (one["torch"], one["device"]), reverse=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        device, file, *stores = sys.argv[1:]
        made = of_stores([Path(store) for store in stores], device)
        Path(file).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    else:
        sys.stdout.write(page(read()))
