"""asv's page of the results that the documents quote."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from asv.config import Config

from benchmarks.figures import Table
from benchmarks.published import KINDS, ROOT, figures, publish, quoted


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    config = Config.load()
    config.results_dir, config.html_dir = str(tmp_path / "results"), str(tmp_path / "html")
    config.branches = ["HEAD"]
    return publish(config)


def test_the_page_shows_what_the_documents_quote(page: Path) -> None:
    index = json.loads((page / "index.json").read_text())
    assert set(index["benchmarks"]) == set(KINDS)
    assert {"cpu", "cuda"} <= set(index["params"]["device"])
    name = "training.track_step_ratio"
    benchmark = index["benchmarks"][name]
    assert benchmark["unit"] == "of stock's step"
    for table in map(Table.of_json, (file.read_text() for file in quoted())):
        expected = {(one.model, one.way): one.value for one in figures(table) if one.benchmark == name}
        (shown,) = (
            (
                json.loads(graph.read_text())
                for graph in (page / "graphs").rglob(f"machine-{table.machine.name}/**/{name}.json")
            )
            if expected
            else ([],)
        )
        for _, values in shown:
            found = dict(zip(product(*benchmark["params"]), values, strict=True))
            assert expected.items() <= found.items()


def test_a_ratio_is_made_where_ways_took_turns_with_stock() -> None:
    table = Table.of_json((ROOT / "suites/benchmarks/results/training_h100_torch2.11_calm.json").read_text())
    ratios = {(one.model, one.way): one.value for one in figures(table) if "ratio" in one.benchmark}
    assert ratios["bert", "stock-like-eager"] == 1
    assert all(0.2 < ratio < 5 for ratio in ratios.values())
