"""The page of retrograd's own report in a browser: two widths, light and dark, every list opened. Needs
chromium and playwright: `nox -s browser`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import retrograd
from browser.exhibits import BROWSER, WITHOUT

pytestmark = pytest.mark.skipif(BROWSER is None, reason=WITHOUT)

COLOURS = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a backward with hooks, with a reason and a note in long words without blanks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    with retrograd.compiled_autograd("aten") as compiled:
        model(torch.ones(2, 4)).sum().backward()
    found, path = compiled.explain(), tmp_path_factory.mktemp("page") / "report.html"
    found.fallbacks[retrograd.errors.Reason("a-code", "x" * 300, "live.run", way_out="do " + "y" * 300)] = 2
    found.notes[retrograd.errors.Reason("a-note", "z" * 300, "live.run")] = None
    found.save_html(path)
    return path


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser: Any, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, asked = context.new_page(), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    assert asked == [report.as_uri()], "it loads nothing else"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    found = page.evaluate("getComputedStyle(document.querySelector('.retrograd')).backgroundColor")
    assert found == COLOURS[scheme]
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    assert page.locator(".retrograd *").evaluate_all(size) >= 12
    text = page.inner_text("main")
    for shown in ("post-accumulate-grad hook: AccumulateGrad", "segment 23", "AddmmBackward0", "a-code ×2"):
        assert shown in text, shown
    assert page.locator(".bar i").count() == page.locator("ol > li").count() > 60
    context.close()
