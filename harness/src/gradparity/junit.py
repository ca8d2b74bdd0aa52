"""junit: rows as JUnit XML, which CI systems show.

In: rows, and what could not run. Out: a file: one suite per subject, one test case per row; a divergence that
nobody expects is a failure, a case that was set aside is skipped; what could not run is a suite of errors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from gradparity.verdict import Row
from gradparity.writing import written

FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that XML cannot hold."""


def write_junit(rows: Iterable[Row], path: Path, errors: Sequence[str] = ()) -> None:
    """Writes the file. Raises StoreFullError if it cannot."""
    with written(path):
        Xml.ElementTree(tree(rows, errors)).write(path, encoding="utf-8", xml_declaration=True)


def tree(rows: Iterable[Row], errors: Sequence[str] = ()) -> Xml.Element:
    """All suites. `errors`: a unit of work and why it could not run, in one text each."""
    by_subject: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_subject[row.subject].append(row)
    root = Xml.Element("testsuites", name="gradparity")
    for subject, mine in by_subject.items():
        root.append(_suite(subject, mine))
    if errors:
        counts = {"tests": str(len(errors)), "errors": str(len(errors)), "failures": "0", "skipped": "0"}
        suite = Xml.SubElement(root, "testsuite", {"name": "could not run", **counts, "time": "0.000"})
        for text in map(_clean, errors):
            case = Xml.SubElement(suite, "testcase", name=text.partition(": ")[0], classname="could not run")
            Xml.SubElement(case, "error", message=text)
    return root


def _suite(subject: str, rows: list[Row]) -> Xml.Element:
    suite = Xml.Element(
        "testsuite",
        name=subject,
        tests=str(len(rows)),
        failures=str(sum(_fails(row) for row in rows)),
        skipped=str(sum(row.set_aside for row in rows)),
        errors="0",
        time=f"{sum(row.seconds for row in rows):.3f}",
    )
    suite.extend(_case(row) for row in rows)
    return suite


def _case(row: Row) -> Xml.Element:
    case = Xml.Element("testcase", name=row.case, classname=row.subject, time=f"{row.seconds:.3f}")
    if row.set_aside:
        Xml.SubElement(case, "skipped", message=_clean(f"{row.symptom}: {row.reason}"))
    elif _fails(row):
        failure = Xml.SubElement(case, "failure", type=row.verdict.value, message=_clean(row.symptom))
        failure.text = _clean("\n".join((row.reason, *row.notes)))
    return case


def _fails(row: Row) -> bool:
    return row.is_find and not row.expected


def _clean(text: str) -> str:
    return FORBIDDEN.sub("?", text)
