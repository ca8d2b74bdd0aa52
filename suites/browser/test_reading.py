"""The report as a reader uses it: three widths, light and dark, search, filter, order, keys. Needs chromium
and playwright: `nox -s browser`. With `GRADPARITY_SCREENSHOTS` set, pictures are left in that folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.exhibits import BROWSER, LEAF, TIMELINES, WITHOUT
from gradparity.html.page import write_page
from gradparity.verdict import Row, Verdict

pytestmark = pytest.mark.skipif(BROWSER is None, reason=WITHOUT)

WIDTHS = (360, 800, 1600)
LONG = "a_name_of_a_scenario_that_is_as_long_as_names_of_scenarios_are_when_they_are_long_and_have_no_blanks"


def found(name: str, verdict: Verdict, symptom: str, **more: Any) -> Row:
    shown = {"program": f"def run(p):\n    {name} = 1  # {'a long line ' * 20}\n", "script": "print('short')"}
    exhibit = shown | more.pop("exhibit", {})
    return Row(
        f"c::{name}", 3, "c", "mine", verdict, symptom, "why", signature=name[:8], exhibit=exhibit, **more
    )


ROWS = [
    Row("c::fine", 0, "c", "mine", Verdict.AGREE, compiles=1, seconds=0.5),
    found("refused", Verdict.UNSUPPORTED, "refusal", seconds=9.0),
    found("order", Verdict.HOOK_ORDER, "hook-order", exhibit={"timelines": TIMELINES}),
    found(LONG, Verdict.DIVERGE, "grad-values", exhibit={"errors": [LEAF]}),
    found("known", Verdict.DIVERGE, "grad-none", expected=True),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(ROWS, path)
    return path


@pytest.fixture
def page(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = getattr(request, "param", (1200, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert errors == []


def cases(page: Any) -> list[str]:
    """The names that can be seen, in order."""
    seen = page.locator("details.find:visible").evaluate_all("all => all.map(one => one.dataset.case)")
    return [name.removeprefix("c::") for name in seen]


EVERYTHING = [LONG, "order", "refused", "known"]


@pytest.mark.parametrize("page", [(w, s) for w in WIDTHS for s in ("light", "dark")], indirect=True)
def test_it_fits_every_width_in_light_and_dark(page: Any, request: pytest.FixtureRequest) -> None:
    page.locator("details.find").evaluate_all("all => all.forEach(one => one.open = true)")
    page.wait_for_selector(".main-svg")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    width, scheme = request.node.callspec.params["page"]
    assert dark == (scheme == "dark")
    text = page.locator("details.find pre").first.evaluate(
        "one => parseFloat(getComputedStyle(one).fontSize)"
    )
    assert text >= 12
    if folder := os.environ.get("GRADPARITY_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/report_{width}_{scheme}.png", full_page=True)


def test_the_important_ones_come_first(page: Any) -> None:
    assert cases(page) == EVERYTHING
    assert page.locator("details.find[open]").count() == 1


def test_search_filter_and_order_by_mouse(page: Any) -> None:
    page.fill("#search", "hook order")
    assert cases(page) == ["order"]
    assert page.inner_text("#count") == "1 of 4"
    page.fill("#search", "")
    page.select_option("#verdict", "DIVERGE")
    assert cases(page) == [LONG, "known"]
    page.select_option("#verdict", "")
    page.select_option("#sort", "seconds")
    assert cases(page)[0] == "refused"


def test_search_filter_order_and_reading_by_keys(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("refusal")
    assert cases(page) == ["refused"]
    page.keyboard.press("Escape")
    assert cases(page) == EVERYTHING
    page.keyboard.press("v")
    assert cases(page) == [LONG, "known"]
    for _ in range(3):
        page.keyboard.press("v")
    page.keyboard.press("s")
    assert page.input_value("#sort") == "cases"
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.locator("details.find[open]").count() == 2
    page.keyboard.press("k")
    focused = page.evaluate("document.activeElement.parentElement.dataset.case")
    assert focused == f"c::{cases(page)[0]}"
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1


def test_the_theme_turns(page: Any) -> None:
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_command_and_script_are_copied(page: Any, browser: Any) -> None:
    button = page.locator("details.find[open] button.copy").first
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    button.click()
    assert re.fullmatch(r"gradparity show c::\w+ -s mine --seed 3", page.evaluate("window.copied"))
    page.wait_for_function("document.querySelector('button.copy').textContent === 'copied'")
    page.click("details.find[open] details > summary")
    page.locator("details.find[open] details button.copy").click()
    assert page.evaluate("window.copied") == "print('short')"
