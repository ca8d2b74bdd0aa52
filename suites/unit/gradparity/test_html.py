"""The report as a page: everything is in the file, and what differs can be seen."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradparity.errors import StoreFullError
from gradparity.html import figures
from gradparity.html.finds import MOST_FINDS, command, finds
from gradparity.html.page import page, write_page
from gradparity.html.timelines import ALONE, OTHER, SAME, paired, picture
from gradparity.junit import tree, write_junit
from gradparity.store.store import Run
from gradparity.verdict import Row, Verdict

pytest.importorskip("plotly", reason="the charts are drawn with it")

TIMELINES = {
    "eager": ["tensor b (1)", "tensor a (2)", "tensor c (3)"],
    "subject": ["tensor a (2)", "tensor b (1)"],
    "differ": [0, 1, 2],
}
LEAF = {
    "what": "grad x",
    "dtype": "float32",
    "size": 2.0,
    "off": 0.5,
    "eager": 1e-7,
    "subject": 0.5,
    "allowed": 1e-5,
    "judged": "DIVERGE",
}
ROWS = [
    Row("op_db::add::0", 0, "op_db", "s", Verdict.AGREE, compiles=1, seconds=0.5),
    Row(
        "op_db::add::1",
        0,
        "op_db",
        "s",
        Verdict.DIVERGE,
        "grad-values",
        "far <off>",
        exhibit={"errors": [LEAF]},
        signature="aa",
        compiles=2,
        seconds=2.0,
    ),
    Row(
        "op_db::mul::1",
        0,
        "op_db",
        "s",
        Verdict.DIVERGE,
        "grad-values",
        "far <off>",
        exhibit={"errors": [LEAF]},
        signature="aa",
    ),
    Row(
        "op_db::sub::0",
        0,
        "op_db",
        "s",
        Verdict.HOOK_ORDER,
        "hook-order",
        "b, a",
        exhibit={"timelines": TIMELINES},
        signature="bb",
    ),
    Row("op_db::sub::1", 0, "op_db", "s", Verdict.UNSUPPORTED, "set-aside", "slow\x00", set_aside=True),
]


def run(number: int) -> Run:
    return Run(f"run{number}", "digest", {}, {"torch": f"2.{number}"}, 1e9 + number, 2e9)


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = page(ROWS, [])
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", text)
    assert text.count("<!doctype html>") == 1


@pytest.mark.parametrize(
    "anchor", ["finds", "matrix", "errors-by-dtype", "errors-by-operator", "compiles", "slowest"]
)
def test_every_part_is_there(anchor: str) -> None:
    assert f'<section id="{anchor}">' in page(ROWS, [])


def test_distinct_divergences_are_counted_and_texts_are_escaped() -> None:
    text = page(ROWS, [])
    assert "5 cases, 3 divergences, 2 distinct" in text
    assert "× 2 <code>aa</code>" in text
    assert "× 1" not in text
    assert "far &lt;off&gt;" in text


def test_a_group_lists_every_case_with_its_stage() -> None:
    one = replace(ROWS[1], stage="inductor", exhibit={"ablation": {"stage": "inductor"}})
    two = replace(ROWS[2], stage="inductor", seconds=0.25)
    listed = finds([one, two]).partition("<summary>All 2 cases</summary>")[2].partition("</table>")[0]
    cells = [re.findall(r"<td>(.*?)</td>", line) for line in listed.split("<tr>")[1:]]
    assert cells == [
        ["op_db::add::1", "broken by inductor", "2.000 s"],
        ["op_db::mul::1", "only with inductor", "0.250 s"],
    ]
    assert "All 1 cases" not in finds([one])


def test_the_trend_needs_two_runs() -> None:
    assert figures.trend([(run(1), ROWS)]) is None
    (line,) = figures.trend([(run(1), ROWS), (run(2), ROWS[:1])]).data
    assert list(line.y) == [1 / 5, 1.0]
    assert line.text == ("2 distinct divergences, torch 2.1", "0 distinct divergences, torch 2.2")


def test_a_page_without_rows_is_a_page() -> None:
    assert "0 cases" in page([], [])


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFullError, match="cannot write"):
        write_page(ROWS, tmp_path / "file" / "report.html")


class TestFigures:
    def test_the_matrix_counts(self) -> None:
        bars = {bar.name: list(bar.text) for bar in figures.matrix(ROWS).data}
        assert bars == {"AGREE": ["1"], "DIVERGE": ["2"], "HOOK_ORDER": ["1"], "set aside": ["1"]}

    def test_errors_are_shares_of_the_magnitude(self) -> None:
        boxes = {box.name: list(box.y) for box in figures.errors_by_dtype(ROWS).data}
        assert boxes == {"eager": [5e-8, 5e-8], "s": [0.25, 0.25]}

    def test_the_slowest_come_last_that_is_on_top(self) -> None:
        (bars,) = figures.slowest(ROWS).data
        assert list(bars.x) == [0.5, 2.0]


class TestPicture:
    def test_the_same_calls_are_linked_the_nth_with_the_nth(self) -> None:
        assert paired(["t a (1)", "t a (2)", "t b ()"], ["t b ()", "t a (1)", "t a (2)"]) == [
            (0, 1),
            (1, 2),
            (2, 0),
        ]

    def test_lines_that_cross_and_a_box_without_a_line(self) -> None:
        drawn = ElementTree.fromstring(picture(TIMELINES, "subject <x>"))
        lines = [item for item in drawn.iter() if item.tag == "line"]
        boxes = [item.get("class") for item in drawn.iter() if item.tag == "rect"]
        assert [(line.get("y1") < line.get("y2"), line.get("class")) for line in lines] == [
            (True, OTHER),
            (False, OTHER),
        ]
        assert boxes == [OTHER, OTHER, ALONE, OTHER, OTHER]

    def test_equal_timelines_are_straight(self) -> None:
        same = {"eager": ["t a (1)"], "subject": ["t a (1)"], "differ": []}
        (line,) = [item for item in ElementTree.fromstring(picture(same, "s")).iter() if item.tag == "line"]
        assert (line.get("y1"), line.get("class")) == (line.get("y2"), SAME)


class TestJunit:
    def test_divergences_fail_and_what_was_set_aside_is_skipped(self, tmp_path: Path) -> None:
        write_junit(ROWS, tmp_path / "out.xml")
        (suite,) = ElementTree.parse(tmp_path / "out.xml").getroot()
        assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "3", "1")
        kinds = [[child.tag for child in case] for case in suite]
        assert kinds == [[], ["failure"], ["failure"], ["failure"], ["skipped"]]

    def test_what_could_not_run_is_an_error(self) -> None:
        suite = tree(ROWS, ["eager c::n: no module named cat"])[-1]
        assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
        (case,) = suite
        assert case.get("name") == "eager c::n"
        assert case[0].get("message") == "eager c::n: no module named cat"

    def test_a_known_divergence_passes(self) -> None:
        (suite,) = tree([ROWS[1].as_expected()])
        assert suite.get("failures") == "0"


class TestFinds:
    def test_the_important_ones_come_first(self) -> None:
        rows = [
            replace(ROWS[1], case="op_db::d::0", signature="dd", expected=True),
            replace(ROWS[1], case="op_db::e::0", signature="ee", symptom="raises KeyError"),
            *ROWS,
        ]
        cases = re.findall(r'data-case="op_db::(\w+)::', finds(rows))
        assert cases == ["add", "sub", "e", "d"]

    def test_each_has_its_program_its_script_and_what_runs_it_again(self) -> None:
        shown = {"program": "def run(p):\n    p < 1\n", "script": "print('<')"}
        text = finds([replace(ROWS[1], seed=2, subject="compile:a b", exhibit=shown)])
        assert "<pre>def run(p):\n    p &lt; 1</pre>" in text
        assert "<pre>print(&#x27;&lt;&#x27;)</pre>" in text
        assert command(replace(ROWS[1], seed=2, subject="compile:a b")) == (
            "gradparity show op_db::add::1 -s 'compile:a b' --seed 2"
        )
        assert escape(command(replace(ROWS[1], seed=2, subject="compile:a b"))) in text

    def test_a_full_page_is_at_most_a_megabyte_beside_the_library(self) -> None:
        import plotly.offline

        full = {"program": "x" * 1800, "script": "x" * 1800, "errors": [LEAF], "timelines": TIMELINES}
        rows = [replace(ROWS[1], signature=str(n), exhibit=full) for n in range(2 * MOST_FINDS)]
        text = page(rows, [])
        assert len(text) - len(plotly.offline.get_plotlyjs()) <= 1_000_000
        shown = text.count('<details class="find"')
        assert 100 < shown < MOST_FINDS
        assert f"<p>… and {2 * MOST_FINDS - shown} more</p>" in text
