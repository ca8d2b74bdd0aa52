"""The report in a real browser without a screen and without a network. Needs chromium: `nox -s browser`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from browser.exhibits import BROWSER, LEAF, TIMELINES, WITHOUT
from gradparity.html.page import write_page
from gradparity.store.store import Run
from gradparity.verdict import Row, Verdict

pytestmark = pytest.mark.skipif(BROWSER is None, reason=WITHOUT)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=8000",
    "--window-size=1200,2400",
)
ROWS = [
    Row("op_db::add::0", 0, "op_db", "s", Verdict.AGREE, compiles=1, seconds=0.5),
    Row(
        "op_db::add::1",
        0,
        "op_db",
        "s",
        Verdict.DIVERGE,
        "grad-values",
        "far off",
        exhibit={"errors": [LEAF]},
    ),
    Row(
        "op_db::b::0",
        0,
        "op_db",
        "s",
        Verdict.HOOK_ORDER,
        "hook-order",
        "b, a",
        exhibit={"timelines": TIMELINES},
    ),
]
SECTIONS = ("matrix", "errors-by-dtype", "errors-by-operator", "compiles", "slowest", "trend")


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    profile = page.with_name("profile")
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    history = [(Run(str(n), "c", {}, {"torch": "2"}, 1e9 + n * 1e5), ROWS[: n + 1]) for n in range(2)]
    write_page(ROWS, path, history)
    return path


def test_every_chart_is_drawn_and_the_timelines_are_a_picture(page: Path) -> None:
    shown = browse(page, "--dump-dom").stdout
    for section in SECTIONS:
        part = shown.partition(f'<section id="{section}">')[2].partition("</section>")[0]
        assert "main-svg" in part, f"the chart {section} was not drawn"
    bars = len(re.findall(r'class="point"', shown))
    assert bars >= 3, "there are no bars"
    assert shown.count('<svg class="timelines"') == 1


def test_it_can_be_photographed(page: Path) -> None:
    target = page.with_name("report.png")
    browse(page, f"--screenshot={target}")
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert target.stat().st_size > 30_000, "the picture is all but empty"
