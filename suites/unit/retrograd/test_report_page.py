"""The report as HTML: what it says, how large it is, and that it needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import retrograd
from retrograd.report import Report


def reported(layers: int) -> Report:
    """The report of an encoder whose parameters have hooks, and of a backward that falls back."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    with retrograd.compiled_autograd("aten") as context:
        for _ in range(2):
            model(torch.randn(2, 3, 8)).sum().backward()
        with torch.autograd.detect_anomaly(check_nan=False):
            model(torch.randn(2, 3, 8)).sum().backward()
    return context.explain()


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning", "ignore:Anomaly Detection")
def test_a_page_of_twelve_layers_is_small_and_complete(tmp_path: Path) -> None:
    report, path = reported(12), tmp_path / "report.html"
    report.save_html(path)
    page = path.read_text(encoding="utf-8")
    assert len(page.encode()) < 100_000
    assert page.lstrip().startswith("<!doctype html>")
    assert not re.search(r"<script|https?://|src=|@import", page)
    for text in ("post-accumulate-grad hook", "segment 119", "anomaly-mode", "NativeLayerNormBackward0"):
        assert text in page, text
    steps = len(re.findall(r"<li class=[csioa]>", page))
    assert steps == sum(len(entry.schedule.segments) + 2 * 144 for entry in report.backwards)


def test_a_notebook_gets_a_part_of_a_page() -> None:
    report = Report()
    assert "Nothing was captured." in report._repr_html_()
    assert "<html" not in report._repr_html_()
    assert report._repr_html_().lstrip().startswith("<style>")


def test_what_a_program_calls_things_cannot_break_the_page(tmp_path: Path) -> None:
    report = Report()
    report.notes[retrograd.errors.Reason("a-note", "<b>bold</b>", "live.run")] = None
    assert "&lt;b&gt;bold&lt;/b&gt;" in report._repr_html_()
