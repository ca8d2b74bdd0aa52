"""The file of known divergences: read strictly, applied, and stale when nothing diverges any more."""

from pathlib import Path

import pytest

from gradparity.errors import ExpectedFileError
from gradparity.expected import load, mark, stale
from gradparity.verdict import Row, Verdict

ENTRY = """
[[expected]]
subject = "retrograd-*"
case = "op_db::add::*"
verdict = "DIVERGE"
reason = "rounding"
link = "https://example.org/1"
date = 2026-01-31
"""


def entries(tmp_path: Path, text: str = ENTRY):
    path = tmp_path / "expected.toml"
    path.write_text(text)
    return load(path)


def row(index: int, verdict: Verdict, set_aside: bool = False, subject: str = "retrograd-live:eager") -> Row:
    return Row(f"op_db::add::{index}", 0, "op_db", subject, verdict, set_aside=set_aside)


def test_explained_rows_are_marked(tmp_path: Path) -> None:
    rows = [row(0, Verdict.DIVERGE), row(1, Verdict.CRASH), row(2, Verdict.DIVERGE, subject="stock-ca:eager")]
    marked = mark(rows, entries(tmp_path))
    assert [item.expected for item in marked] == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "is_stale"),
    [
        ([row(0, Verdict.AGREE), row(1, Verdict.DIVERGE)], False),
        ([row(0, Verdict.AGREE), row(1, Verdict.AGREE)], True),
        ([row(0, Verdict.CRASH)], True),
        ([], False),
        ([row(0, Verdict.AGREE, subject="stock-ca:eager")], False),
        ([row(0, Verdict.NONDETERMINISTIC, set_aside=True)], False),
    ],
)
def test_stale(tmp_path: Path, rows: list[Row], is_stale: bool) -> None:
    assert bool(stale(rows, entries(tmp_path))) is is_stale


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY.replace('reason = "rounding"', ""), "missing \\['reason'\\]"),
        (ENTRY + 'color = "red"\n', "unknown \\['color'\\]"),
        (ENTRY.replace("DIVERGE", "AGREE"), "verdict 'AGREE' is none of"),
        ("[[known]]\n", "unknown tables"),
        ("[[", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ExpectedFileError, match=message):
        entries(tmp_path, text)


def test_an_empty_file_expects_nothing(tmp_path: Path) -> None:
    assert entries(tmp_path, "") == []
