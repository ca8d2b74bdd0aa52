"""The file of known divergences: read strictly, applied, and stale when nothing diverges any more."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradparity.errors import ExpectedFileError
from gradparity.expected import load
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


@pytest.mark.parametrize(
    ("span", "is_there"),
    [("2.14..", True), ("..2.14", False), ("2.15..2.15", True), ("2.11..2.13", False), ("2.9..2.16", True)],
)
def test_an_entry_may_be_of_some_releases_of_torch(
    span: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.15.0+cpu")
    known = entries(tmp_path, f'{ENTRY}torch = "{span}"\n')
    assert bool(known.divergences) == is_there
    assert [item.expected for item in known.mark([row(0, Verdict.DIVERGE)])] == [is_there]


def test_a_range_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpectedFileError, match=r"\[\[expected\]\] 1: torch: '>=2.14' is no range"):
        entries(tmp_path, f'{ENTRY}torch = ">=2.14"\n')


def test_explained_rows_are_marked(tmp_path: Path) -> None:
    rows = [row(0, Verdict.DIVERGE), row(1, Verdict.CRASH), row(2, Verdict.DIVERGE, subject="stock-ca:eager")]
    marked = entries(tmp_path).mark(rows)
    assert [item.expected for item in marked] == [True, False, False]


@pytest.mark.parametrize("name", ["mine.py:graph", "compile:mine.py:graph", "mine.py", "*mine.py:*"])
def test_a_backend_is_named_in_an_entry_as_it_is_on_the_command_line(tmp_path: Path, name: str) -> None:
    known = entries(tmp_path, ENTRY.replace("retrograd-*", name))
    differs, agrees = (
        row(0, verdict, subject="compile:mine.py:graph") for verdict in (Verdict.DIVERGE, Verdict.AGREE)
    )
    assert known.mark([differs])[0].expected
    assert known.stale([agrees])
    assert not known.stale([replace(agrees, subject="compile:other.py:graph")])


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
    assert bool(entries(tmp_path).stale(rows)) is is_stale


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
    known = entries(tmp_path, "")
    assert (known.divergences, known.fallbacks) == ((), ())


FALLBACK = """
[[fallback]]
subject = "retrograd-*"
cases = ["op_db::add::1", "op_db::add::[23]"]
code = "reentrant"
reason = "one thing at a time"
date = 2026-01-31
"""


def fell_back(index: int, *codes: str) -> Row:
    notes = tuple(f"fallback: [{code}] because" for code in codes)
    return replace(row(index, Verdict.AGREE), notes=notes, fell_back=bool(codes))


@pytest.mark.parametrize(
    ("fallen", "unlisted"),
    [
        (fell_back(1), ()),
        (fell_back(1, "reentrant"), ()),
        (fell_back(2, "reentrant", "tracing"), ("tracing",)),
        (fell_back(0, "reentrant"), ("reentrant",)),
        (replace(row(1, Verdict.AGREE), notes=("fallback: no code",), fell_back=True), ("",)),
    ],
)
def test_a_fallback_must_be_listed_with_its_case_and_code(tmp_path: Path, fallen: Row, unlisted) -> None:
    known = entries(tmp_path, FALLBACK)
    assert known.mark([fallen], {"retrograd-live:eager"})[0].unlisted == unlisted
    assert known.mark([fallen], {"somebody else"})[0].unlisted == ()


@pytest.mark.parametrize(
    ("fallen", "is_stale"),
    [
        ([fell_back(1, "reentrant")], []),
        ([fell_back(1), fell_back(2, "reentrant"), fell_back(3)], ["op_db::add::1"]),
        ([fell_back(1, "tracing")], ["op_db::add::1"]),
        ([fell_back(0)], []),
    ],
)
def test_every_glob_of_a_fallback_entry_can_be_stale(tmp_path: Path, fallen, is_stale) -> None:
    assert [entry.case for entry in entries(tmp_path, FALLBACK).stale(fallen)] == is_stale
    assert entries(tmp_path, FALLBACK + "sometimes = true\n").stale(fallen) == []


def test_a_sample_does_not_make_a_glob_stale(tmp_path: Path) -> None:
    rows = [row(0, Verdict.AGREE), row(1, Verdict.AGREE)]
    known = entries(tmp_path)
    assert (len(known.stale(rows)), len(known.stale(rows, sampled=True))) == (1, 0)
    one = entries(tmp_path, ENTRY.replace("op_db::add::*", rows[0].case))
    assert len(one.stale(rows, sampled=True)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FALLBACK.replace('code = "reentrant"', ""), "missing \\['code'\\]"),
        (FALLBACK + 'link = "x"\n', "unknown \\['link'\\]"),
        (FALLBACK.replace("cases = [", "# ["), "missing \\['cases'\\]"),
        (FALLBACK.replace('["op_db::add::1", "op_db::add::[23]"]', '"op_db::add::1"'), "a list of globs"),
        (FALLBACK + 'sometimes = "yes"\n', "true or false"),
    ],
)
def test_a_wrong_fallback_entry_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ExpectedFileError, match=message):
        entries(tmp_path, text)
