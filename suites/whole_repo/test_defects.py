"""The table of what was mended since 334be4c says what the data say; each class has what stands for it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gradparity.corpus import scenarios
from gradparity.corpus.scenario import registered

ROOT = Path(__file__).parents[2]


def defects() -> Any:
    spec = importlib.util.spec_from_file_location("defects", ROOT / "suites/parity/defects.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULE = defects()
MENDED: dict[str, list[str]] = json.loads(MODULE.DATA.read_text())


def test_the_table_has_a_line_for_each_class_and_one_for_all() -> None:
    lines = [*MODULE.table(MENDED)][2:]
    counts = [int(line.split("|")[3].split(",")[0]) for line in lines if "| none: " not in line]
    assert len(lines) == len(MODULE.classes()) + 1
    assert min(counts) > 0
    assert counts[-1] == len(MENDED)


@pytest.mark.parametrize("one", MODULE.classes(), ids=lambda one: one["what"][:40])
def test_each_class_has_scenarios_or_something_instead(one: dict[str, Any]) -> None:
    assert bool(MODULE.of_class(one, MENDED)) == bool(one["cases"]) != bool(one.get("instead"))


def test_the_scenarios_exist() -> None:
    assert scenarios.TOPICS
    assert set(MENDED) <= set(registered())


def test_a_scenario_counts_that_failed_before_and_passes_now() -> None:
    before = {("a", "s"): True, ("b", "s"): True, ("c", "s"): False, ("d", "s"): True}
    now = {("a", "s"): False, ("b", "s"): True, ("c", "s"): False}
    assert MODULE.compared(before, now) == {"a": ["s"]}
