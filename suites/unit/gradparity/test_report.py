"""The report: counts in the table, one line per divergence, JSONL there and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradparity.report import fallback_lines, line, lines, table, unlisted_lines
from gradparity.store.lines import write_lines
from gradparity.verdict import Row, Verdict

ROWS = [
    Row("op_db::add::0", 0, "op_db", "s", Verdict.AGREE),
    Row("op_db::add::1", 0, "op_db", "s", Verdict.AGREE, notes=("fallback: sparse",), fell_back=True),
    Row("op_db::add::2", 0, "op_db", "s", Verdict.DIVERGE, "grad-values", "far\noff"),
    Row("op_db::add::3", 0, "op_db", "s", Verdict.HOOK_ORDER, "hook-order", "swapped", expected=True),
    Row("op_db::add::4", 0, "op_db", "s", Verdict.UNSUPPORTED, "set-aside", "too slow", set_aside=True),
]


def test_the_table_counts_verdicts_and_fallbacks() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(ROWS))
    text = console.export_text().splitlines()
    head, line = [item for item in text if "cases" in item or "op_db" in item]
    names = [cell.strip() for cell in head.strip("┃").split("┃")]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    counted = dict(zip(names, cells, strict=True))
    assert counted == {
        "subject": "s", "corpus": "op_db", "cases": "5", "AGREE": "2", "DIVERGE": "1", "HOOK_ORDER": "1",
        "set aside": "1", "fell back": "1", "expected": "1",
    }  # fmt: skip


def test_one_line_per_divergence_unexpected_first() -> None:
    assert [line.plain for line in lines(ROWS)] == [
        "DIVERGE      s  op_db::add::2  grad-values: far off",
        "HOOK_ORDER   s  op_db::add::3 (expected)  hook-order: swapped",
    ]


def test_a_line_names_the_stage_and_the_operator_that_an_ablation_found() -> None:
    found = {"ablation": {"stage": "aot_eager"}}
    row = replace(ROWS[2], stage="aot_eager", operator="aten.mul.Tensor", exhibit=found)
    told = "DIVERGE      s  op_db::add::2  broken by aot_eager at aten.mul.Tensor  grad-values: far off"
    assert line(row).plain == told


@pytest.mark.parametrize(("own", "told"), [(False, "only with inductor"), (True, "already with inductor")])
def test_without_an_ablation_a_line_blames_no_stage(own: bool, told: str) -> None:
    row = replace(ROWS[2], stage="inductor", stocks_own=own)
    assert f"  {told}  grad-values" in line(row).plain
    nothing = {"ablation": {"stage": "", "steps": []}}
    assert "broken by" not in line(replace(row, exhibit=nothing)).plain


def test_fallbacks_are_counted_by_reason() -> None:
    assert fallback_lines([*ROWS, replace(ROWS[1], case="op_db::add::9")]) == ["     2 × s  fallback: sparse"]


def test_one_line_per_unlisted_fallback() -> None:
    notes = ("fallback: [a] known", "fallback: [b] new", "other")
    row = replace(ROWS[0], notes=notes, fell_back=True, unlisted=("b",))
    assert unlisted_lines([row, ROWS[1]]) == ["unlisted fallback: s  op_db::add::0  fallback: [b] new"]


def test_jsonl_leads_back_to_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    write_lines(ROWS, path)
    assert [Row.from_json(json.loads(line)) for line in path.read_text().splitlines()] == ROWS
